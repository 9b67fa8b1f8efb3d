#!/usr/bin/env bash
# One row of release-check.sh, inside its own root or environment: $ROW has the clone, and gets the result.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. jobs/common.sh

note() { printf '%s\n' "$*" >>"$ROW/result"; }
# timed NAME COMMAND...: notes its seconds; a step that fails is the last.
timed() {
    local name=$1 began=$SECONDS
    shift
    note "step $name"
    log "$name: $*"
    "$@"
    note "$name $((SECONDS - began))"
}

# As docs/install.md has it: this mpirun on the PATH, and its library where mpi4py looks, under the name that it has there.
debian_mpi() {
    local name=$1 package=$1 pattern='libmpi.so.*' library
    [ "$name" != openmpi ] || package=openmpi-bin
    [ "$name" != mpich ] || pattern='libmpich.so.12'
    command -v "mpirun.$name" >/dev/null || apt_install "$package"
    library=$(find -L /usr/lib/*-linux-gnu -maxdepth 1 -name "$pattern" | sort -V | tail -n 1)
    [ -n "$library" ] || die "no library of $name"
    mkdir -p "$ROW/mpi/bin"
    # Not a link: MPICH's mpirun looks for its other programs where it was called.
    printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v "mpirun.$name")" >"$ROW/mpi/bin/mpirun"
    chmod +x "$ROW/mpi/bin/mpirun"
    if [ "$name" = mpich ]; then
        ln -sf "$library" "$ROW/mpi/libmpi.so.12"
        export LD_LIBRARY_PATH=$ROW/mpi
    else
        export MPI4PY_LIBMPI=$library
    fi
    export PATH=$ROW/mpi/bin:$PATH FEDLADA_BUNDLED_MPI=0
}

# What communicates, alone and on 2 ranks, with pytest and nothing else of the extra [test].
selection() {
    local needed chosen=(tests/mpi_communication/test_transport.py tests/mpi_communication/test_same_bits.py
        tests/mpi_communication/test_world.py tests/rundir/test_checkpoint.py tests/rounds/test_trainer.py)
    use_mpi
    export OMP_NUM_THREADS=1
    mapfile -t needed < <(sed -nE 's/^ *"((pytest[a-z-]*|hypothesis)>=[0-9.]+)".*/\1/p' pyproject.toml)
    "$python" -m pip install -q "${needed[@]}"
    "$python" -m pytest -m "not slow" "${chosen[@]}"
    "$mpirun" -n 2 "$python" -m mpi4py -m pytest --with-mpi -m "not slow" "${chosen[@]}"
}

: >"$ROW/result"
if [ "$ROW_MPI" != bundled ]; then
    note "mpi Debian's $ROW_MPI"
    note "step mpi"
    debian_mpi "$ROW_MPI"
fi
timed install ensure_installed mpi report
note "step versions"
note "python $("$python" -c 'import platform; print(platform.python_version())')"
note "torch $("$python" -c 'import torch; print(torch.__version__)')"
note "mpi $("$python" -c 'import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor(); print(name, ".".join(map(str, version)))')"
"$python" -m pip list --disable-pip-version-check
timed quickstart bash jobs/quickstart.sh
if [ "$ROW_TESTS" = all ]; then timed tests bash jobs/test.sh; else timed tests selection; fi
