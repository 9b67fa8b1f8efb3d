#!/usr/bin/env bash
# Submits the unfinished runs of a grid as one array job, and the report that follows when all have ended, well or not:
#
#   jobs/submit-grid.sh NAME [--limit K] [--indices 0-9,40] [--set KEY=VALUE] [--runs DIR] [--report DIR] [sbatch options]
#
# NAME is one of `python -m fedlada_mpi.grid`, or a TOML file; --limit lets K runs go on at a time; --indices submits a part;
# --set changes a setting of every run. Interrupted runs are resumed, so the same command completes a grid.
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
limit='' indices='' runs=runs/$title report=report/$title options=() changes=()
while [ $# -gt 0 ]; do
    case $1 in
        --limit=* | --indices=* | --runs=* | --report=* | --set=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        --limit | --indices | --runs | --report | --set)
            if [ $# = 1 ]; then
                echo "error: $1 needs a value" >&2
                exit 2
            fi
            if [ "$1" = --set ]; then changes+=(--set "$2"); else declare "${1#--}=$2"; fi
            shift 2
            ;;
        *)
            options+=("$1")
            shift
            ;;
    esac
done
arguments=("$grid" --runs "$runs" "${changes[@]}")
if [ -z "$indices" ]; then indices=$(python -m fedlada_mpi.grid "${arguments[@]}" --todo); fi

after=()
if [ -n "$indices" ]; then
    array=$("$here/submit.sh" grid --parsable --job-name="$title" --output="$FEDLADA_LOGS/%x-%A_%a.out" \
        --array="$indices${limit:+%$limit}" "${options[@]}" -- "${arguments[@]}")
    array=${array%%;*} # with the cluster's name in a federation
    echo "grid $title: job $array, runs $indices into $runs"
    # Not afterok: a failed run is shown as missing, and would otherwise keep the report waiting forever.
    after=(--dependency="afterany:$array")
else
    echo "grid $title: all runs are finished in $runs"
fi
report_job=$("$here/submit.sh" report --parsable --job-name="$title-report" "${after[@]}" -- "$runs" --out "$report" --skip-broken)
echo "report: job ${report_job%%;*}, into $report"
echo "output: $FEDLADA_LOGS"
