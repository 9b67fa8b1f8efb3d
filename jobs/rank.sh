#!/usr/bin/env bash
# Starts one rank of a job: srun --kill-on-bad-exit=1 ... bash jobs/rank.sh COMMAND...
# srun reports only the largest status of all ranks, and kills the others at the first that is not 0. So a stop with a checkpoint
# (75), which all ranks agree on, is an orderly end for srun, and what the job must know is noted in FEDLADA_STATE.

# A USR1 before Python has its handler would kill the rank: ignored until then, and sent again by the job.
trap '' USR1
"$@" &
rank=$!
# srun ends the survivors of a dead rank by TERM, which they would take as a wish to finish the round.
trap '[ ! -e "${FEDLADA_STATE:-/nonexistent}/died" ] || kill -KILL $rank' TERM
while kill -0 $rank 2>/dev/null; do
    wait $rank # a signal to this shell ends the wait early
done
wait $rank
code=$?
if [ -n "${FEDLADA_STATE:-}" ]; then
    case $code in
        0) ;;
        2) : >"$FEDLADA_STATE/refused" ;;
        75) : >"$FEDLADA_STATE/stopped" && code=0 ;;
        *) : >"$FEDLADA_STATE/died" ;;
    esac
fi
exit $code
