#!/usr/bin/env bash
# The tests, with all their set-up: ruff, mypy, then pytest alone and on several ranks.
#
#   bash jobs/test.sh                  what a change is likely to break; on 2 ranks, too
#   bash jobs/test.sh --all            everything; on 4 ranks, too
#   bash jobs/test.sh -k transport     the same with options for pytest
#
# The tests against a real SLURM, a real browser and several nodes need Debian packages, installed here when run as root.
# FEDLADA_TEST_STRICT=1 makes it an error to be without them. common.sh lists the other variables.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

everything='' tier=(-m "not slow") on_two="not slow and not four_ranks and not two_ranks"
if [ "${1:-}" = --all ]; then
    everything=1 tier=() on_two="not slow and not four_ranks"
    shift
fi

# need WHAT COMMAND PACKAGE...: install the packages unless the command succeeds already.
need() {
    local what=$1 check=$2
    shift 2
    bash -c "$check" >/dev/null 2>&1 && return
    if can_apt; then
        log "installing $* for the $what tests"
        # One by one: a distribution that lacks one of them may have the others.
        for package in "$@"; do apt_install "$package" || true; done
        bash -c "$check" >/dev/null 2>&1 && return
    fi
    [ "${FEDLADA_TEST_STRICT:-0}" != 1 ] || die "the $what tests need: apt-get install $*"
    warn "the $what tests will be skipped; they need: sudo apt-get install $*"
}

PATH=$PATH:/usr/sbin:/sbin
needs() {
    need SLURM 'command -v slurmctld && command -v munged && ls /usr/lib/*/pmix2/lib/libpmix.so' slurm-wlm munge libpmix-dev
    need node 'command -v ip && command -v unshare && command -v nsenter' iproute2 util-linux
    need browser 'command -v chromium || command -v chromium-browser || command -v google-chrome' chromium
}
ensure_venv # which may need packages, too
needs &     # while pip works
needed=$!
ensure_installed mpi report test
wait $needed || exit 2
use_mpi
# Threads of their own would slow down ranks that share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$root"

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
counts='' failed='' selected=$*

# Beside the tests, which often wait for processes that they have started.
static_checks() {
    { "$venv/bin/ruff" check . && "$venv/bin/ruff" format --check .; } >"$logs/ruff" 2>&1 || touch "$logs/ruff-failed"
    "$venv/bin/mypy" >"$logs/mypy" 2>&1 || touch "$logs/mypy-failed"
}
static_checks &
checks=$!

# suite NAME SECONDS COMMAND...: run one pytest, keep its last line, go on after a failure.
suite() {
    local name=$1 limit=$2 status=0 count
    shift 2
    log "pytest, $name"
    limited "$limit" "$@" 2>&1 | tee "$logs/log" || status=$?
    count=$(sed 's/\x1b\[[0-9;]*m//g; s/\r//g' "$logs/log" | sed -nE 's/^=* *([0-9]+ [a-z]+.* in [0-9.]+s( \([0-9:]+\))?) *=*$/\1/p' | tail -n 1)
    case $status in
        # A suite in which everything is skipped has shown nothing.
        0) [[ $count = *passed* || -n $selected ]] || failed=1 count="FAILED: no test passed ($count)" ;;
        5) [[ -n $selected ]] || failed=1 ;; # nothing was selected
        124 | 137) failed=1 count="stopped after $limit s" ;;
        *) failed=1 count="FAILED with status $status${count:+ ($count)}" ;;
    esac
    counts+="   $name: $count"$'\n'
}

# on_ranks N SECONDS OPTION...: where a failure ends all ranks, the tests behind it run in another start.
on_ranks() {
    local ranks=$1 limit=$2 before
    shift 2
    export FEDLADA_TEST_LOG=$logs/ranks-$ranks
    : >"$FEDLADA_TEST_LOG"
    while :; do
        before=$(wc -l <"$FEDLADA_TEST_LOG")
        suite "$ranks ranks" "$limit" "$mpirun" -n "$ranks" "$python" -m mpi4py -m pytest --with-mpi --durations=5 "$@"
        if grep -q '^finished' "$FEDLADA_TEST_LOG" || [ "$(wc -l <"$FEDLADA_TEST_LOG")" = "$before" ]; then break; fi
    done
    unset FEDLADA_TEST_LOG
}

# Bytecode of the package and of the tests, once for the thousands of processes that follow, each of which would compile
# them again where PYTHONDONTWRITEBYTECODE is set.
"$python" -m compileall -q fedlada_mpi data_prep tests || true
PYTHONDONTWRITEBYTECODE='' "$python" -m pytest -q --collect-only >/dev/null 2>&1 || true

colour=no
[ ! -t 1 ] || colour=yes
options=(--color="$colour" "$@")
# One process more than cores, as tests often wait for others that they have started; with two more, these wait for cores.
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
suite "alone  " 2400 "$python" -m pytest -n "$((cores + 1))" --dist worksteal --durations=15 "${tier[@]}" "${options[@]}"
on_ranks 2 900 -m "$on_two" "${options[@]}"
[ -z "$everything" ] || on_ranks 4 900 -m "not slow and not two_ranks" "${options[@]}"

wait $checks || failed=1
for name in ruff mypy; do
    if [ -e "$logs/$name-failed" ]; then
        log "$name"
        cat "$logs/$name"
        failed=1 counts+="   $name   : FAILED"$'\n'
    else
        counts+="   $name   : clean"$'\n'
    fi
done

log "counts"
printf '%s' "$counts"
[ -z "$failed" ] || { log "FAILED"; exit 1; }
log "all passed in $((SECONDS / 60)) min $((SECONDS % 60)) s"
