#!/usr/bin/env bash
# The whole test suite, with all its set-up: ruff, mypy, then pytest alone, on 2 and on 4 ranks.
#
#   bash jobs/test.sh                  everything
#   bash jobs/test.sh -k transport     the same with options for pytest
#
# The tests against a real SLURM, a real browser and several nodes need Debian packages, installed here when run as root.
# FEDLADA_TEST_STRICT=1 makes it an error to be without them. common.sh lists the other variables.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

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
need SLURM 'command -v slurmctld && command -v munged && ls /usr/lib/*/pmix2/lib/libpmix.so' slurm-wlm munge libpmix-dev
need node 'command -v ip && command -v unshare && command -v nsenter' iproute2 util-linux
need browser 'command -v chromium || command -v chromium-browser || command -v google-chrome' chromium

ensure_installed mpi report test
use_bundled_mpi
# Threads of their own would slow down ranks that share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cd "$root"

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
counts='' failed='' selected=$*

# check NAME COMMAND...: run a static check, go on after a failure.
check() {
    local name=$1
    shift
    log "$name"
    if "$@"; then counts+="   $name: clean"$'\n'; else counts+="   $name: FAILED"$'\n' failed=1; fi
}
ruff_clean() { "$venv/bin/ruff" check . && "$venv/bin/ruff" format --check .; }
check "ruff   " ruff_clean
check "mypy   " "$venv/bin/mypy"

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
        124 | 137) failed=1 count="stopped after $limit s" ;;
        *) failed=1 count="FAILED with status $status${count:+ ($count)}" ;;
    esac
    counts+="   $name: $count"$'\n'
}

colour=no
[ ! -t 1 ] || colour=yes
suite "alone  " 3000 "$python" -m pytest --durations=15 --color="$colour" "$@"
for ranks in 2 4; do
    suite "$ranks ranks" 1500 "$mpirun" -n "$ranks" "$python" -m mpi4py -m pytest --with-mpi --durations=5 --color="$colour" "$@"
done

log "counts"
printf '%s' "$counts"
[ -z "$failed" ] || { log "FAILED"; exit 1; }
log "all passed"
