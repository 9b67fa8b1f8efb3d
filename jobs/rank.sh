#!/usr/bin/env bash
# One rank, started by launch.sh, which learns from the files in FEDLADA_STATE how it ended.
state=$FEDLADA_STATE

trap '' USR1 # inherited by the rank, which a USR1 before Python's own handler would kill
trap : TERM  # not inherited
"$@" &
rank=$!

# srun sends TERM to the survivors of a dead rank, which they would take as a request to finish the round.
kill_if_another_rank_died() {
    trap '[ ! -e "$state/died" ] || kill -KILL $rank' TERM
    while kill -0 $rank; do
        sleep 1 &
        wait $!
    done
}
kill_if_another_rank_died &>/dev/null &
trap '' TERM # a `wait` that a trap ends can lose the status of a process that ends with it (bash 5.2)

handles_usr1() { ((0x$(sed -n 's/^SigCgt:\s*//p' /proc/$rank/status) >> ($(kill -l USR1) - 1) & 1)) 2>/dev/null; }
if [ "${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-0}}" = 0 ]; then
    while kill -0 $rank 2>/dev/null && ! handles_usr1; do sleep 0.2; done
    : >"$state/ready"
fi
wait $rank
code=$?
case $code in
    0) : >"$state/finished" ;;
    2) : >"$state/refused" ;;
    3) : >"$state/diverged" ;;
    # All ranks agreed to stop: for srun that is no reason to kill the slower ones.
    75) : >"$state/stopped" && code=0 ;;
    *)
        # The others go on, and learn of it by mpirun, to which an exit with a status is no death.
        if [ "${OMPI_MCA_mpi_ft_enable:-}" = 1 ]; then kill -KILL $$; fi
        : >"$state/died"
        ;;
esac
exit $code
