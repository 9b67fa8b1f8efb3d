"""The doctor's checks of the machine: GPUs, cores, memory between ranks, data and disk."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..gpu import mps, sharing
from ..support.processes import core_limit
from .check import FAIL, OK, SKIP, WARN, Here, Result, check

if TYPE_CHECKING:
    from ..data.manifest import Manifest
    from ..mpi import World

RESNET18 = 11_279_112  # elements of the largest vector that a preset moves, 45 MB
YIELD = "OMPI_MCA_mpi_yield_when_idle"
ROOM = 5e9  # bytes: a checkpoint of SCAFFOLD has a vector for each of 100 clients


@check("GPU", "nvidia-smi shows the driver and what uses the GPU; --device cpu trains without it", needs="torch")
def gpu(here: Here) -> Result:
    import torch

    driver = Path("/proc/driver/nvidia/version")
    if not torch.cuda.is_available():
        if not driver.exists():
            return OK, "none: runs train on the CPU"
        if not torch.version.cuda:
            return WARN, "there is a driver, but this torch is for the CPU", "install torch for CUDA; docs/install.md"
        do = "a newer driver, or torch for an older CUDA; look at CUDA_VISIBLE_DEVICES and the job's --gpus"
        return WARN, f"there is a driver, but torch for CUDA {torch.version.cuda} sees no GPU", do
    count = torch.cuda.device_count()
    torch.cuda.set_device((here.world.local_rank if here.world else 0) % count)
    here.cuda = bool((torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda") == 64).all())
    if not here.cuda:
        return FAIL, f"{torch.cuda.get_device_name()} computes wrongly", "--device cpu, and have the GPU checked"
    free, total = (amount / 1e9 for amount in torch.cuda.mem_get_info())
    version = re.search(r"\d{3}\.[\d.]+", driver.read_text() if driver.exists() else "")
    found = f"{count} x {torch.cuda.get_device_name()}, {free:.1f} of {total:.1f} GB free"
    found += f", driver {version[0] if version else 'unknown'}"
    by_mps = mps.is_running()
    shared, cure = sharing.advice([rank["gpu"] for rank in here.neighbours], by_mps)
    return (OK if by_mps else WARN, f"{found}; {shared}", cure) if shared else (OK, found)


@check("kernels", "--compile off trains without, slower; Triton writes to ~/.triton or TRITON_CACHE_DIR", needs="GPU")
def compiled_kernels(here: Here) -> Result:
    if not here.cuda:
        return OK, "compiled kernels are for GPUs only"
    from ..gpu import layer_kernels

    if not layer_kernels.available():
        return WARN, "no Triton: runs train without compiled kernels, slower", "pip install triton"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        do = "apt-get install gcc libc6-dev, or load a compiler's module, or --compile off"
        return FAIL, "Triton needs a C compiler: no CC, gcc or clang", do
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return FAIL, f"Triton needs {header}", "apt-get install python3-dev, or another Python, or --compile off"
    largest = pooled("cuda")
    if largest != 3:
        return FAIL, f"a compiled maximum of 0 to 3 gave {largest:g}, expected 3", "--compile off, and reinstall triton"
    return OK, f"Triton with {compiler}: one kernel compiled, run and checked"


def pooled(device: str) -> float:
    """The largest of 0, 1, 2 and 3, by a compiled kernel."""
    import torch

    from ..gpu import layer_kernels

    return layer_kernels.max_pool(torch.arange(4.0, device=device).view(1, 1, 2, 2, 1), 2).item()


@check("CUDA-aware", needs="MPI torch")
def cuda_buffers(here: Here) -> Result:
    from ..mpi.plan import cuda_aware

    if cuda_aware():
        return OK, "MPI accepts GPU buffers"
    if here.cuda and here.machines > 1:
        do = "the cluster's own MPI, if it can: docs/install.md#with-a-clusters-own-mpi"
        return WARN, "MPI accepts host buffers only: vectors between machines are copied through host memory", do
    return OK, "no, and not needed here"


@check("cores")
def cores(here: Here) -> Result:
    neighbours = here.neighbours
    ranks, usable = len(neighbours), len({core for rank in neighbours for core in rank["cores"]})
    threads = os.environ.get("OMP_NUM_THREADS", "")
    found = f"{usable} of {os.cpu_count()} for {ranks} rank{'s'[: ranks > 1]}, OMP_NUM_THREADS={threads or '(unset)'}"
    if usable < min(ranks, os.cpu_count() or 1):
        do = "export PRTE_MCA_hwloc_default_binding_policy=none, or srun --cpu-bind=none, or ask for more cores"
        return WARN, f"{found}: the launcher bound the ranks to few cores", do
    if (limit := core_limit()) < usable:
        usable = max(1, int(limit))
        found += f"; the container may use {limit:g}"
    if usable < ranks:
        return WARN, f"{found}: ranks take turns", "fewer ranks give the same result: they share the clients"
    if threads.isdigit() and int(threads) * ranks > usable:
        return WARN, f"{found}: more threads than cores", f"export OMP_NUM_THREADS={usable // ranks}"
    return OK, found


@check("waiting", needs="MPI")
def waiting(here: Here) -> Result:
    from ..mpi import implementation

    neighbours = here.neighbours
    if len(neighbours) <= len({core for rank in neighbours for core in rank["cores"]}):
        return OK, "every rank has a core to wait on"
    if not implementation().startswith("Open MPI"):
        found = f"ranks of {implementation()} may spin on cores that others need"
        return WARN, found, "prefer srun --mpi=pmi2 to mpiexec"
    by_srun = "SLURM_STEP_NUM_TASKS" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
    if by_srun and os.environ.get(YIELD) != "1":
        return WARN, "under srun, ranks spin on cores that others need", f"export {YIELD}=1"
    return OK, "ranks share cores and yield them while they wait"


@check("/dev/shm", needs="ranks torch")
def shared_memory(here: Here) -> Result:
    from ..mpi import shared_window

    assert here.world is not None  # as "ranks" has passed
    stat, ranks = os.statvfs("/dev/shm"), here.world.node.size
    found = f"{stat.f_bavail * stat.f_frsize / 1e9:.2f} GB free"
    if ranks == 1:
        return OK, f"{found}; ResNet-18 takes {RESNET18 * 4 / 1e9:.2f} GB for each rank of a node"
    found += f", ResNet-18 takes {1.2 * ranks * RESNET18 * 4 / 1e9:.2f} GB for {ranks} ranks"
    if shared_window.fits(here.world, RESNET18 * 4):
        return OK, found
    return WARN, f"{found}: vectors will take a slower transport", "docker run --shm-size=2g ..., or mount it larger"


@check("transport", "--transport host (on GPUs: staged); docs/troubleshooting.md, Running", needs="ranks")
def transport(here: Here) -> Result:
    if not all(rank["torch"] for rank in here.ranks):
        return SKIP, "it needs torch on every rank"
    import torch

    from ..mpi.plan import plan_transport

    world = here.world
    assert world is not None  # as "ranks" has passed
    if world.size == 1:
        return OK, "one rank: nothing to move"
    device = torch.device("cuda" if all(world.allgather_json(here.cuda)) else "cpu")
    moving, vector = plan_transport(world, RESNET18, torch.float32, device), torch.empty(RESNET18, device=device)
    seconds, wrong = {}, ""
    for name, move in (("Bcast", moving.bcast), ("Reduce", moving.reduce)) * 2:  # the first time is slower
        vector.fill_(world.rank + 1)
        world.barrier()
        start = time.perf_counter()
        move([vector])
        seconds[name] = time.perf_counter() - start
        total = world.size * (world.size + 1) // 2
        expected = 1 if name == "Bcast" else total if world.rank == 0 else world.rank + 1
        # Reported at the end: the other ranks are already in the next collective.
        if not wrong and not bool((vector == expected).all()):
            wrong = f"{moving.kind}: {name} gave {vector[0]:g}, expected {expected}"
    moving.close()
    if wrong:
        return FAIL, wrong, "--transport host, or staged"
    times = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
    return OK, f"{moving.kind}, checked; ResNet-18's {RESNET18 * 4 / 1e6:.0f} MB over {world.size} ranks: {times}"


@check("data", "set FEDLADA_DATA to a folder that every node can read", needs="packages")
def data(here: Here) -> Result:
    from ..data.manifest import MANIFEST, data_root, read_manifest

    root, world = data_root(), here.world
    folders = sorted(str(path.parent) for path in root.glob(f"*/{MANIFEST}"))
    if world is not None:
        folders = world.broadcast_json({"folders": folders})["folders"]
    prepared = []
    for folder in folders:
        manifest = read_manifest(folder)
        for name in needed_files(manifest, world):
            file, expected = manifest.root / name, manifest.files[name]["bytes"]
            size = file.stat().st_size if file.exists() else None
            if size != expected:
                what = "is missing" if size is None else f"has {size} bytes, expected {expected}"
                return FAIL, f"{file} {what}", manifest.command
        prepared.append(f"{manifest.root.name} ({int(manifest.sizes.sum())} examples, {manifest.clients} clients)")
    if not prepared:
        do = "the digits need nothing; others: python -m data_prep --dataset cifar10 --raw PATH --out data/cifar10"
        return OK, f"nothing prepared in {root.resolve()}", do.replace("data/", f"{root}/")
    return OK, f"in {root.resolve()}: {', '.join(prepared)}"


def needed_files(manifest: Manifest, world: World | None) -> list[str]:
    """What this rank reads in a run: the files of its clients, and on the root those of no client."""
    from ..data.owners import owned_clients
    from ..data.shards import files_of

    if world is None or world.size == 1:
        return [*manifest.files]
    if world.rank == 0:
        return [name for name, entry in manifest.files.items() if "client_ids" not in entry]
    return files_of(manifest, owned_clients(manifest, world.size - 1)[world.rank - 1])


SHARED = "choose another folder with --out, on a file system that all nodes share"


@check("output", "choose another folder with --out")
def output(here: Here) -> Result:
    above = (here.out.resolve(), *here.out.resolve().parents)
    folder = next(path for path in above if path.exists())
    # Every rank must come upon the very folder that the root has: by a file that the root puts there.
    mark, level, seen = folder / f".fedlada-doctor-{os.getpid()}", above.index(folder), True
    if here.world is not None and here.world.size > 1:
        with contextlib.suppress(OSError):
            if here.world.rank == 0:
                mark.touch()
        told = here.world.broadcast_json({"level": level, "mark": mark.name if mark.exists() else ""})
        if told["mark"]:
            seen = appears(above[min(told["level"], len(above) - 1)] / told["mark"])
        here.world.barrier()
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)
    if not seen:
        return FAIL, f"{above[told['level']]} is not the folder that rank 0 sees", SHARED
    free = shutil.disk_usage(folder).free
    found = f"{free / 1e9:.1f} GB free in {folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return FAIL, f"{folder} cannot be written", "choose another folder with --out"
    if free < ROOM:
        return (
            WARN,
            f"{found}; checkpoints of ResNet-18 take up to {ROOM / 1e9:.0f} GB",
            "choose another disk with --out",
        )
    return OK, found


def appears(path: Path, seconds: float = 5.0) -> bool:
    """Whether a file is there, or comes to be: nodes may learn of each other's files a few seconds late."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
