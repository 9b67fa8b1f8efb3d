#!/usr/bin/env bash
# Submits what is left of a search: an array job for each stage, which begins when the one before has ended, and the page:
#
#   jobs/submit-tune.sh PLAN.toml [--limit K] [--out DIR] [sbatch options]
#
# --limit lets K runs go on at a time. Interrupted runs are resumed, so the same command completes a search.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
FEDLADA_HOME=$(dirname "$here")
. "$here/env.sh"

if [ $# = 0 ] || [[ $1 = -* ]]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
plan=$1
shift
title=$(basename "$plan" .toml)
limit='' out=runs/$title options=()
while [ $# -gt 0 ]; do
    case $1 in
        # To sbatch, --out=DIR is short for --output=DIR.
        --limit=* | --out=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        --limit | --out)
            if [ $# = 1 ]; then
                echo "error: $1 needs a value" >&2
                exit 2
            fi
            declare "${1#--}=$2"
            shift 2
            ;;
        *)
            options+=("$1")
            shift
            ;;
    esac
done
todo=$(python -m fedlada_mpi.tune "$plan" --out "$out" --todo)

after=()
while read -r stage indices; do
    if [ -z "$stage" ]; then
        echo "search $title: all runs are finished in $out"
        continue
    fi
    array=$("$here/submit.sh" tune --parsable --job-name="$title-$stage" --output="$FEDLADA_LOGS/%x-%A_%a.out" \
        --array="$indices${limit:+%$limit}" "${after[@]}" "${options[@]}" -- "$plan" --out "$out" --stage "$stage")
    array=${array%%;*} # with the cluster's name in a federation
    echo "search $title: job $array, stage $stage, runs $indices into $out"
    # Not afterok: a trial that failed is the worst one, and the search goes on.
    after=(--dependency="afterany:$array")
done <<<"$todo"
page_job=$("$here/submit.sh" tune-page --parsable --job-name="$title-page" "${after[@]}" -- "$plan" --out "$out")
echo "page: job ${page_job%%;*}, $out/tune.html"
echo "output: $FEDLADA_LOGS"
