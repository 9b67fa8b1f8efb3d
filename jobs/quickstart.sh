#!/usr/bin/env bash
# From a clone to a trained model in one command, on a machine with Python 3.10 or newer and nothing else:
#
#   bash jobs/quickstart.sh                          FedLADA on the embedded digits over 4 ranks
#   bash jobs/quickstart.sh --algorithm scaffold     any option of python -m fedlada_mpi.run
#
# FEDLADA_RANKS sets the number of ranks; common.sh lists the other variables.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ensure_installed mpi report
use_mpi
export FEDLADA_DATA=${FEDLADA_DATA:-$root/data}

# A second quickstart replaces the first one's run, never another.
out=$root/runs/quickstart replace=--overwrite previous=
for argument in "$@"; do
    case $previous/$argument in
        --out/*) out=$argument replace= ;;
        */--out=*) out=${argument#--out=} replace= ;;
    esac
    previous=$argument
done

ranks=${FEDLADA_RANKS:-4}
activate=". $(printf %q "$venv")/bin/activate"
log "training over $ranks ranks"
status=0
limited 900 "$python" -m fedlada_mpi.run -n "$ranks" --out "$out" ${replace:+"$replace"} "$@" || status=$?
case $status in
    0) ;;
    2) exit 2 ;; # with its own line on what is wrong
    75) log "before that: $activate"; exit 75 ;;
    *) die "the training ended with status $status; $activate; python -m fedlada_mpi.doctor examines this machine" ;;
esac

"$python" - "$out" "$@" <<'PYTHON'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1]).resolve()
if {"-h", "--help", "--help-all", "--print-config"} & {*sys.argv[2:]}:
    sys.exit(0)  # nothing was trained
# mpirun can return 0 when it has lost a node: what counts is what the run has written.
summary = json.loads((out / "summary.json").read_text()) if (out / "summary.json").exists() else {}
if summary.get("status") != "finished":
    sys.exit(f"error: the training has ended, but {out} is not finished: add --out {out} --resume to go on")
accuracy, best = summary["final"]["test_acc"], summary["best"]
print(f"== test accuracy {accuracy:.1%} after {summary['rounds']} rounds in {summary['seconds']:.1f} s", end="")
print(f" (best {best['test_acc']:.1%} in round {best['round']})")
print(f"== files in {out}: model.pt (the model), metrics.jsonl (every round), config.json (the settings)")
PYTHON
if [ -e "$out/summary.json" ]; then
    # As they can be pasted, whatever the folder is called.
    log "next: $activate"
    log "      python -m fedlada_mpi.report $(printf %q "$out") --out report"
    log "      python -m fedlada_mpi.run -n $ranks --algorithm scaffold"
fi
