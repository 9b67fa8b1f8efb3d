# shellcheck shell=bash
# How a training job ends: sourced by the job scripts, after env.sh.
#
#   supervise COMMAND...      runs COMMAND, which starts the ranks by launch.sh, and ends the job:
#     finished (0)                        the job completes
#     bad input (2), diverged (3), no command (126-7)   the job fails with that status
#     stopped with a checkpoint (75)      the job requeues itself, any number of times
#     anything else, a dead rank too      the job requeues itself until FEDLADA_MAX_FAILURES in a row
# USR1 to the batch shell (sbatch --signal=B:USR1@180) asks the ranks to stop with a checkpoint. A cancelled job stays cancelled.

log() { echo "[$(date +%FT%T)] job $job: $*"; }

supervise() {
    # An array element must be named by its index: the number of the last one is that of the whole array.
    job=$SLURM_JOB_ID
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    export FEDLADA_STATE=$FEDLADA_LOGS/.state-$job
    if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then rm -rf "$FEDLADA_STATE"; fi
    mkdir -p "$FEDLADA_STATE"
    rm -f "$FEDLADA_STATE"/{ready,code}
    log "start $((${SLURM_RESTART_COUNT:-0} + 1)) on ${SLURM_JOB_NODELIST:-this node}"

    local stop=no terminated=no code
    trap '[ $stop = asked ] || stop=yes' USR1
    trap 'terminated=yes' TERM
    # Its status goes through a file: a `wait` that a trap ends can lose that of any process that ends with it (bash 5.2).
    (
        trap : TERM USR1
        code=0
        "$@" || code=$?
        echo $code >"$FEDLADA_STATE/code"
    ) &
    local child=$!
    # bash runs traps between commands and in `wait` only, so nothing here may block for long.
    while kill -0 "$child" 2>/dev/null; do
        # A cancelled job's ranks are signalled by SLURM, unless it does not know them.
        if [ $terminated = yes ] && [ $stop = no ] && [ -e "$FEDLADA_STATE/mpirun" ]; then stop=yes; fi
        # Once, and not before they listen.
        if [ $stop = yes ] && [ -e "$FEDLADA_STATE/ready" ]; then
            log "asking the ranks to stop with a checkpoint"
            if [ -e "$FEDLADA_STATE/mpirun" ]; then
                kill -USR1 "$(cat "$FEDLADA_STATE/mpirun")" || true
            else
                scancel --signal=USR1 "$job" || true
            fi
            stop=asked
        fi
        sleep 1 &
        wait $! || true
    done
    trap - USR1 TERM
    code=$(cat "$FEDLADA_STATE/code" 2>/dev/null || echo 1)

    case $code in
        0) finish 0 "finished" ;;
        2) finish 2 "bad input, see above: not requeued" ;;
        3) finish 3 "diverged, see above: not requeued, as it would again" ;;
        126 | 127) finish $code "the command could not be started: not requeued" ;;
    esac
    if [ $terminated = yes ] && [ "$(job_state)" != RUNNING ]; then
        finish $code "ended from outside with status $code: not requeued; submit it again to resume"
    fi
    local failures=0
    if [ $code != 75 ]; then
        failures=$(($(cat "$FEDLADA_STATE/failures" 2>/dev/null || echo 0) + 1))
        if ((failures > FEDLADA_MAX_FAILURES)); then
            finish $code "status $code, failed $failures times in a row: not requeued; submit it again to resume"
        fi
    fi
    echo $failures >"$FEDLADA_STATE/failures"
    if [ $code = 75 ]; then log "stopped with a checkpoint: requeued"; else log "status $code, failure $failures: requeued"; fi
    scontrol requeue "$job" || finish $code "requeue was refused: submit it again to resume"
    # SLURM ends this shell now; leaving first could make the job look complete.
    sleep 300
    exit $code
}

job_state() { scontrol --oneliner show job "$job" 2>/dev/null | grep -o 'JobState=[A-Z_]*' | head -n 1 | cut -d= -f2; }

finish() {
    log "$2"
    rm -rf "$FEDLADA_STATE"
    exit "$1"
}
