#!/usr/bin/env bash
# Runs COMMAND on all ranks of a job and returns one status for them: bash jobs/launch.sh LAUNCH_KIND COMMAND...
# srun alone reports the largest status of all ranks, kills the others at the first that is not 0, and can return 0 when it failed to
# start any. So the ranks note in FEDLADA_STATE how they ended.
state=${FEDLADA_STATE:?set by jobs/supervise.sh}
rm -f "$state"/{ready,finished,refused,diverged,stopped,died,mpirun}

# A killed step leaves shared memory (MPICH) or folders (PMIx) under its number, and the same number again would hang or not start.
for ((step = 0; step < ${SLURM_RESTART_COUNT:-0}; step++)); do srun --nodes=1 --ntasks=1 true; done

trap : TERM USR1 # SLURM signals the ranks itself
rank=$(dirname "$0")/rank.sh
if [ "$1" = ulfm ]; then
    echo "ranks by mpirun: where one dies, the others go on"
    # At a TERM, mpirun would kill the ranks a second later; a blocked signal stays so in a new program, but not in mpirun's ranks.
    blocked='import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.execvp(sys.argv[1], sys.argv[1:])'
    ranks=(python -c "$blocked" mpirun --with-ft ulfm -n "$SLURM_NTASKS" bash "$rank" "${@:2}")
    # SRUN_CPUS_PER_TASK: by it mpirun's own step on other nodes would have the cores of one rank.
    unset SRUN_CPUS_PER_TASK
    if [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ]; then
        # In a step, whose processes SLURM signals when it preempts the job.
        srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --mpi=none "${ranks[@]}"
        code=$?
    else
        "${ranks[@]}" &
        echo $! >"$state/mpirun" # which passes USR1 on, as SLURM sees no ranks
        while kill -0 $! 2>/dev/null; do wait $!; done
        wait $!
        code=$?
        rm -f "$state/mpirun"
    fi
    if [ -e "$state/finished" ] || [ -e "$state/stopped" ]; then code=0; fi # but for ranks that died
else
    echo "ranks by srun: where one dies, all end, and the job starts again"
    srun --kill-on-bad-exit=1 --mpi="$1" bash "$rank" "${@:2}"
    code=$?
fi

if [ -e "$state/refused" ]; then exit 2; fi
if [ -e "$state/diverged" ]; then exit 3; fi
if [ $code != 0 ]; then exit $code; fi
if [ -e "$state/stopped" ]; then exit 75; fi
if [ -e "$state/finished" ]; then exit 0; fi
echo "error: the ranks could not be started, or were lost with their node" >&2
exit 1
