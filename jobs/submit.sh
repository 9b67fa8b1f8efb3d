#!/usr/bin/env bash
# Submits a job with the settings of jobs/env.sh:
#
#   jobs/submit.sh {train,bench,test,prepare,report,tune-page} [sbatch options] [-- options of the job's command]
#   jobs/submit.sh train --time=12:00:00 -- --dataset cifar10 --algorithm fedlada --out runs/one
#
# Paths are relative to the current folder; output goes to FEDLADA_LOGS.
set -euo pipefail
FEDLADA_HOME=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$FEDLADA_HOME/jobs/env.sh"

name=${1:-}
script=$FEDLADA_HOME/jobs/$name.sbatch
if [ ! -f "$script" ]; then
    [ -z "$name" ] || echo "error: no job '$name': expected one of those below" >&2
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
shift

options=(--export=ALL --output="$FEDLADA_LOGS/%x-%j.out")
if [ -n "$FEDLADA_ACCOUNT" ]; then options+=(--account="$FEDLADA_ACCOUNT"); fi
if [ -n "$FEDLADA_PARTITION" ]; then options+=(--partition="$FEDLADA_PARTITION"); fi
case $name in
    train | grid | tune | bench | test)
        gpus=${FEDLADA_GPUS_PER_NODE##*:}
        if [[ ! $gpus =~ ^[0-9]+$ ]]; then
            echo "error: FEDLADA_GPUS_PER_NODE is '$FEDLADA_GPUS_PER_NODE', expected the GPUs of one node: export FEDLADA_GPUS_PER_NODE=4 (0: CPUs)" >&2
            exit 2
        fi
        options+=(--cpus-per-task="$FEDLADA_CPUS_PER_RANK")
        if [ "$gpus" -gt 0 ]; then options+=(--gpus-per-node="$FEDLADA_GPUS_PER_NODE"); fi
        per_node=${FEDLADA_RANKS_PER_NODE:-$gpus}
        if [ "$name" != test ]; then
            options+=(--ntasks="$FEDLADA_RANKS")
            if [ "$per_node" -gt 0 ]; then
                options+=(--ntasks-per-node="$per_node" --nodes=$(((FEDLADA_RANKS + per_node - 1) / per_node)))
            fi
        fi
        ;;
esac
# shellcheck disable=SC2206
options+=($FEDLADA_SBATCH)
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
if [ $# -gt 0 ]; then shift; fi
exec sbatch "${options[@]}" "$script" "$@"
