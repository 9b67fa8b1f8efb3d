#!/usr/bin/env bash
# Submits every run of a grid as an array job, and the report that follows when all have ended, well or not:
#
#   jobs/submit-grid.sh NAME [--limit K] [--indices 0-9,40] [--runs DIR] [--report DIR] [sbatch options]
#
# NAME is a grid of `python -m fedlada_mpi.grid --list`, or a file; --limit runs at most K runs at a time; --indices submits a part.
# Finished runs are skipped and interrupted ones resumed, so the same command completes a grid.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
FEDLADA_HOME=$(dirname "$here")
. "$here/env.sh"

if [ $# = 0 ] || [[ $1 = -* ]]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
grid=$1
shift
title=$(basename "$grid" .toml)
limit='' indices='' runs=runs/$title report=report/$title options=()
while [ $# -gt 0 ]; do
    case $1 in
        --limit | --indices | --runs | --report)
            if [ $# = 1 ]; then echo "error: $1 needs a value" >&2; exit 2; fi
            declare "${1#--}=$2"
            shift 2
            ;;
        *) options+=("$1"); shift ;;
    esac
done
if [ -z "$indices" ]; then
    count=$(python -m fedlada_mpi.grid "$grid" --count)
    if [[ ! $count =~ ^[1-9][0-9]*$ ]]; then echo "error: the grid $grid has ${count:-no} runs" >&2; exit 2; fi
    indices=0-$((count - 1))
fi

array=$("$here/submit.sh" grid --parsable --job-name="$title" --output="$FEDLADA_LOGS/%x-%A_%a.out" \
    --array="$indices${limit:+%$limit}" "${options[@]}" -- "$grid" --runs "$runs")
array=${array%%;*}
after=$("$here/submit.sh" report --parsable --job-name="$title-report" --dependency="afterany:$array" -- "$runs" --out "$report")
echo "grid $grid: runs $indices in job $array, then its report in job ${after%%;*}"
echo "output in $FEDLADA_LOGS, runs in $runs, report in $report"
