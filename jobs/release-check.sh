#!/usr/bin/env bash
# The README's quickstart and tests from nothing, for one Python, torch and MPI after another; prints one table.
#
#   bash jobs/release-check.sh                               every Python; the oldest torch; Debian's Open MPI and MPICH
#   bash jobs/release-check.sh --python 3.11 --mpi bundled   only this one; lists with commas, and all combinations of them
#   bash jobs/release-check.sh --debian trixie --mpi mpich   in a new Debian, with its own Python (as root)
#   bash jobs/release-check.sh --debian trixie-arm64         the same, emulated, where Debian's qemu-user-static and
#                                                            binfmt-support are installed; it takes hours (--limit)
#   bash jobs/release-check.sh --list                        the rows, without running them
#
#   --torch newest|oldest|VERSION   oldest: the one that pyproject.toml names
#   --tests quick|all               quick: five files of tests, on 2 ranks too; all: the README's bash jobs/test.sh
#   --out DIR                       logs and the table (logs/release-check)
#   --keep                          leave the environments in DIR, 2 to 8 GB each; else one at a time is on the disk
#   --limit SECONDS                 the most that a row may take (3600)
#
# As root, a row has a root folder of its own, an overlay over this machine's: what it installs is gone afterwards, and
# nothing of this machine changes. Else it has a home, a clone and variables of its own, and the MPIs that are there.
# Where pip looks for packages is up to pip: PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CERT, ...
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pythons='' torches='' mpis='' suites='' tests=quick out=$root/logs/release-check keep='' list='' limit=3600
while [ $# -gt 0 ]; do
    case $1 in
        --python | --torch | --mpi | --debian | --tests | --out | --limit)
            [ $# -ge 2 ] || die "$1 needs a value: see the first lines of $0"
            ;;
    esac
    case $1 in
        --python) pythons=${2//,/ } ;;
        --torch) torches=${2//,/ } ;;
        --mpi) mpis=${2//,/ } ;;
        --debian) suites=${2//,/ } ;;
        --tests) tests=$2 ;;
        --out) out=$2 ;;
        --limit) limit=$2 ;;
        --keep) keep=1 && shift && continue ;;
        --list) list=1 && shift && continue ;;
        -h | --help) sed -n '2,/^\[/{/^#/s/^# \{0,1\}//p}' "$0" && exit 0 ;;
        *) die "unknown option $1: see the first lines of $0" ;;
    esac
    shift 2
done
for mpi in $mpis; do
    case $mpi in bundled | openmpi | mpich) ;; *) die "--mpi: got $mpi, expected bundled, openmpi or mpich" ;; esac
done
for version in $pythons; do
    [[ $version =~ ^3\.[0-9]+$ ]] || die "--python: got $version, expected such as 3.11"
done
for torch in $torches; do
    [[ $torch =~ ^(newest|oldest|[0-9]+(\.[0-9]+)+)$ ]] || die "--torch: got $torch, expected newest, oldest or such as 2.4.0"
done
case $tests in quick | all) ;; *) die "--tests: got $tests, expected quick or all" ;; esac
[[ $limit =~ ^[1-9][0-9]*$ ]] || die "--limit: got $limit, expected seconds"
[ -z "$suites" ] || [ -z "$pythons" ] || die "--debian has its own Python: leave --python out"
case $out in /*) ;; *) out=$PWD/$out ;; esac

supported=$(sed -nE 's/.*"Programming Language :: Python :: (3\.[0-9]+)".*/\1/p' "$root/pyproject.toml")
oldest_torch=$(sed -nE 's/^ *"torch>=([0-9.]+)".*/\1/p' "$root/pyproject.toml")

# interpreter 3.11: a working one on the PATH, of pyenv or of uv.
interpreter() {
    local candidate found
    for candidate in "$(command -v "python$1" || true)" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-"$1".*/bin/python; do
        # Itself, not one of pyenv's stand-ins, which need its variables.
        found=$("${candidate:-false}" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null) || continue
        [ "${found%% *}" != "$1" ] || { printf '%s\n' "${found#* }" && return; }
    done
    return 1
}

first_there() {
    local version
    for version in "$@"; do
        if interpreter "$version" >/dev/null; then printf '%s' "$version" && return; fi
    done
    printf '%s' "$1"
}

# Rows: WHERE PYTHON TORCH MPI.
rows=()
if [ -n "$suites" ]; then
    for suite in $suites; do
        for torch in ${torches:-newest}; do
            for mpi in ${mpis:-bundled openmpi mpich}; do rows+=("$suite - $torch $mpi"); done
        done
    done
elif [ -n "$pythons$torches$mpis" ]; then
    # shellcheck disable=SC2086
    for version in ${pythons:-$supported}; do
        for torch in ${torches:-newest}; do
            for mpi in ${mpis:-bundled}; do rows+=("here $version $torch $mpi"); done
        done
    done
else
    # shellcheck disable=SC2086
    oldest_python=$(first_there $supported)
    # shellcheck disable=SC2086
    usual=$(first_there "$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)" $supported)
    for version in $supported; do rows+=("here $version newest bundled"); done
    rows+=("here $oldest_python oldest bundled" "here $usual newest openmpi" "here $usual newest mpich")
fi

if [ -n "$list" ]; then
    printf '%-10s %-8s %-8s %s\n' where Python torch MPI
    # shellcheck disable=SC2086
    for row in "${rows[@]}"; do printf '%-10s %-8s %-8s %s\n' $row; done
    exit 0
fi

mkdir -p "$out/pip"
own_root=''
if [ "$(id -u)" = 0 ] && unshare --mount --pid --fork true 2>/dev/null && grep -qw overlay /proc/filesystems; then own_root=1; fi
[ -z "$suites" ] || [ -n "$own_root" ] || die "--debian needs root, and Linux namespaces with overlays"

# What a row may know of this machine: where packages come from, and how to get there.
outside=(LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
while IFS= read -r line; do outside+=("$line"); done < <(env | grep -E '^(PIP_[A-Z_]+|https?_proxy|no_proxy|HTTPS?_PROXY|NO_PROXY|SSL_CERT_FILE)=' || true)

# in_root LOWER FOLDER COMMAND...: in a root of its own, over LOWER, with FOLDER as /mnt and pip's downloads as /srv.
in_root() {
    local lower=$1 folder=$2
    shift 2
    mkdir -p "$folder/tmp"
    chmod 1777 "$folder/tmp"
    # shellcheck disable=SC2016
    timeout -k 20 "$limit" unshare --mount --pid --ipc --fork --kill-child bash -euc '
        lower=$1 folder=$2 pip=$3
        shift 3
        # Not on the disk of the folder itself, where that is an overlay already, as in containers.
        space=$folder/overlay
        mkdir -p "$space"
        [ "$(stat -f -c %T "$folder")" != overlayfs ] || mount -t tmpfs tmpfs "$space"
        mkdir -p "$space/upper" "$space/work" "$space/root"
        mount -t overlay overlay -o "lowerdir=$lower,upperdir=$space/upper,workdir=$space/work" "$space/root"
        cd "$space/root"
        mkdir -p mnt srv proc dev sys tmp etc/ssl/certs
        mount -t proc proc proc
        mount --rbind /dev dev
        mount -t tmpfs tmpfs dev/shm
        mount --rbind /sys sys
        mount --bind "$pip" srv
        if [ "$lower" != / ]; then
            rm -f etc/resolv.conf
            cp /etc/resolv.conf etc/resolv.conf
            cp -f "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" etc/ssl/certs/ca-certificates.crt 2>/dev/null || true
        fi
        mount --bind "$folder" mnt
        mount --bind "$folder/tmp" tmp
        # Not chroot, out of which processes come when they enter a node of the tests, or another mount namespace.
        mkdir .outside
        pivot_root . .outside
        cd /
        umount --lazy .outside
        rmdir .outside
        exec "$@"
    ' - "$lower" "$folder" "$out/pip" "$@"
}

# debian SUITE: a minimal Debian with Python and nothing else, made once, by a debootstrap that is not kept.
debian() {
    local folder=$out/debian-$1 suite=${1%%-*} emulated=()
    [ "$suite" = "$1" ] || emulated=(--arch="${1#*-}")
    [ ! -e "$folder/made" ] || return 0
    log "making a Debian $1 in $folder"
    rm -rf "$folder" && mkdir -p "$folder"
    # shellcheck disable=SC2016
    in_root / "$folder" env -i "${outside[@]}" bash -euc '
        export DEBIAN_FRONTEND=noninteractive
        apt-get -qq update && apt-get -qq install -y --no-install-recommends debootstrap >/dev/null
        # Suites that are newer than this debootstrap are made like sid.
        [ -e "/usr/share/debootstrap/scripts/$1" ] || ln -s sid "/usr/share/debootstrap/scripts/$1"
        debootstrap --variant=minbase --include=python3,ca-certificates "${@:2}" "$1" /mnt/system
    ' - "$suite" "${emulated[@]}" >"$out/debian-$1.log" 2>&1 || return 1
    rm -rf "$folder/overlay" "$folder/tmp"
    touch "$folder/made"
}

# A clone as others get it, with what is not committed yet.
copy_clone() {
    mkdir -p "$1"
    if git -C "$root" rev-parse --git-dir >/dev/null 2>&1; then
        (cd "$root" && git ls-files -z --cached --others --exclude-standard --deduplicate |
            while IFS= read -r -d '' name; do [ ! -e "$name" ] || printf '%s\0' "$name"; done |
            tar --null -T - -cf -) | tar -C "$1" -xf -
    else
        tar -C "$root" --exclude=./.venv --exclude=./data --exclude=./runs --exclude=./logs -cf - . | tar -C "$1" -xf -
    fi
}

# value NAME OTHERWISE: what the row has noted last.
value() {
    local noted=''
    [ ! -e "$folder/result" ] || noted=$(sed -n "s/^$1 //p" "$folder/result" | tail -n 1)
    printf '%s' "${noted:-${2:-}}"
}

# run_row NAME WHERE PYTHON TORCH MPI: sets result, the row's line of the table.
run_row() {
    local name=$1 where=$2 version=$3 torch=$4 mpi=$5 program='' folder=$out/$1 place status=0 began=$SECONDS verdict step
    rm -rf "$folder"
    if [ "$where" = here ]; then
        if ! program=$(interpreter "$version"); then
            result=$(line "$version" "$torch" "$mpi" - - - - "not there: no Python $version on this machine")
            return
        fi
    elif ! debian "$where"; then
        result=$(line "$where" "$torch" "$mpi" - - - - "not there: no Debian $where ($out/debian-$where.log)")
        return
    fi
    if [ -z "$own_root" ] && [ "$mpi" != bundled ] && ! command -v "mpirun.$mpi" >/dev/null; then
        result=$(line "$version" "$torch" "$mpi" - - - - "not there: no mpirun.$mpi, and only root may install it for a row")
        return
    fi
    mkdir -p "$folder/home"
    copy_clone "$folder/clone"
    place=$folder
    [ -z "$own_root" ] || place=/mnt
    case $torch in newest) ;; oldest) echo "torch==$oldest_torch" ;; *) echo "torch==$torch" ;; esac >"$folder/constraint.txt"
    local variables=("${outside[@]}" HOME="$place/home" ROW="$place" ROW_MPI="$mpi" ROW_TESTS="$tests" PIP_CONSTRAINT="$place/constraint.txt" PIP_COMPILE=0)
    [ -z "$program" ] || variables+=(FEDLADA_PYTHON="$program")
    if [ -n "$own_root" ]; then
        variables+=(PIP_CACHE_DIR=/srv)
        local lower=/
        [ "$where" = here ] || lower=$out/debian-$where/system
        in_root "$lower" "$folder" env -i "${variables[@]}" bash /mnt/clone/jobs/release-row.sh || status=$?
    else
        variables+=(PIP_CACHE_DIR="$out/pip" FEDLADA_APT=0)
        env -i "${variables[@]}" timeout -k 20 "$limit" bash "$folder/clone/jobs/release-row.sh" || status=$?
    fi </dev/null >"$out/$name.log" 2>&1
    step=$(value step)
    case $status in
        0) verdict=passed ;;
        124 | 137) verdict="FAILED: stopped after $limit s ($name.log)" failed=1 ;;
        *) verdict="FAILED: ${step:-its start} ($name.log)" failed=1 ;;
    esac
    [ "$where" = here ] || where=" $where"
    result=$(line "$(value python "$version")${where#here}" "$(value torch "$torch")" "$(value mpi "$mpi")" \
        "$(value install)" "$(value quickstart)" "$(value tests)" "$((SECONDS - began))" "$verdict")
    [ -n "$keep" ] || rm -rf "$folder"
}

line() { printf '%-21s %-14s %-18s %9s %11s %7s %6s  %s' "${1:--}" "${2:--}" "${3:--}" "${4:--}" "${5:--}" "${6:--}" "${7:--}" "$8"; }

failed='' table=$out/table.txt
{
    printf 'fedlada_mpi %s, %s, %s, %s cores, %s; each row in %s; tests: %s\n\n' \
        "$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$root/fedlada_mpi/support/version.py")$(git -C "$root" log -1 --format=' (%h)' 2>/dev/null || true)" \
        "$(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release 2>/dev/null || uname -s)" "$(uname -m)" "$(nproc)" "$(date -u +%F)" \
        "$(if [ -n "$own_root" ]; then echo "a root folder of its own"; else echo "an environment of its own"; fi)" "$tests"
    line Python torch MPI 'install s' 'quickstart s' 'tests s' 'all s' result && echo
} >"$table"
log "logs and the table: $out"
cat "$table"
for row in "${rows[@]}"; do
    # shellcheck disable=SC2086
    set -- $row
    result=''
    run_row "${1/#here/python$2}-torch-$3-$4" "$@"
    printf '%s\n' "$result" | tee -a "$table"
done
[ -n "$keep" ] || rm -rf "$out/pip"
[ -z "$failed" ] || { log "FAILED"; exit 1; }
log "no row failed"
