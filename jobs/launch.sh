#!/usr/bin/env bash
# Runs COMMAND on all ranks of a job and returns one status for them: bash jobs/launch.sh MPI_KIND COMMAND...
# srun alone reports the largest status of all ranks, kills the others at the first that is not 0, and can return 0 when it failed to
# start any. So the ranks note in FEDLADA_STATE how they ended.
state=${FEDLADA_STATE:?set by jobs/supervise.sh}
rm -f "$state"/{ready,finished,refused,diverged,stopped,died}

# A killed step leaves shared memory (MPICH) or folders (PMIx) under its number, and the same number again would hang or not start.
for ((step = 0; step < ${SLURM_RESTART_COUNT:-0}; step++)); do srun --nodes=1 --ntasks=1 true; done

trap : TERM USR1 # SLURM signals the ranks itself
# Where a rank dies, the others must end instead of waiting for it.
srun --kill-on-bad-exit=1 --mpi="$1" bash "$(dirname "$0")/rank.sh" "${@:2}"
code=$?

if [ -e "$state/refused" ]; then exit 2; fi
if [ -e "$state/diverged" ]; then exit 3; fi
if [ $code != 0 ]; then exit $code; fi
if [ -e "$state/stopped" ]; then exit 75; fi
if [ -e "$state/finished" ]; then exit 0; fi
echo "error: srun could not start the ranks" >&2
exit 1
