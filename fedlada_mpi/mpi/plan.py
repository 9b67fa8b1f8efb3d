"""Which transport moves the vectors of a run: the one of ``--transport``, or the fastest that works here."""

from __future__ import annotations

import ctypes
import os

import torch
from mpi4py import MPI

from ..support.errors import UserError
from . import shared_window
from .shared_window import SharedWindowTransport
from .staged import StagedTransport
from .transport import DirectTransport, HostTransport, SingleRank, Transport
from .world import World, implementation

TRANSPORTS: dict[str, type[Transport]] = {
    cls.kind: cls for cls in (HostTransport, DirectTransport, StagedTransport, SharedWindowTransport)
}
# Variables by which Cray MPICH, MVAPICH2 and Intel MPI take device buffers; they have no call that tells.
_CUDA_VARIABLES = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "I_MPI_OFFLOAD")


def plan_transport(
    world: World, size: int, dtype: torch.dtype, device: torch.device, kind: str = "auto", wire: str = "fp32"
) -> Transport:  # fmt: skip
    """A transport for vectors of ``size`` elements; ``wire`` as in ``--wire``. Collective."""
    if world.size == 1:
        return SingleRank(world, size, dtype, device)
    bytes_per_vector, cuda = size * dtype.itemsize, device.type == "cuda"
    if wire != "fp32" and not world.all_ranks(world.node.size == world.size):
        if kind not in ("auto", "shared"):
            raise UserError(f"--wire {wire} is for the pieces of --transport shared: got {kind}, expected auto")
        with world.wait_limit:
            return SharedWindowTransport(world, size, dtype, device, rounded=True)
    if kind == "auto":
        kind = _fastest(world, bytes_per_vector, device)
    elif kind == "direct" and not (cuda and cuda_aware()):
        raise UserError(
            f"--transport direct: {implementation()} is not CUDA-aware here, or the run is on the CPU; use auto"
        )
    elif kind == "staged" and not cuda:
        raise UserError("--transport staged copies device vectors, but the run is on the CPU: use auto or host")
    elif kind == "host" and cuda:
        raise UserError("--transport host needs vectors in host memory, but the run is on the GPU: use auto or staged")
    elif kind == "shared" and not world.all_ranks(shared_window.fits(world, bytes_per_vector)):
        need = world.node.size * bytes_per_vector / 1e6
        raise UserError(f"--transport shared needs {need:.0f} MB in /dev/shm for the ranks of a node: use auto")
    with world.wait_limit:
        return TRANSPORTS[kind](world, size, dtype, device)


def _fastest(world: World, bytes_per_vector: int, device: torch.device) -> str:
    # Within a node the window is faster than a CUDA-aware library, too, whose Reduce adds on the host. One node that
    # gains by a window is enough: ranks without one take part as their own leaders.
    worth_it = world.all_on_node(shared_window.worth_it(world, bytes_per_vector))
    if not world.all_ranks(not worth_it):
        return "shared"
    if device.type == "cpu":
        return "host"
    direct = world.all_ranks(cuda_aware()) and world.all_ranks(_device_buffers_work(world, device))
    return "direct" if direct else "staged"


def cuda_aware() -> bool:
    """Whether the MPI library says that it takes device buffers; False where it does not say."""
    if any(os.environ.get(name) == "1" for name in _CUDA_VARIABLES):
        return True
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    query.restype, query.argtypes = ctypes.c_int, []
    return bool(query())


def _device_buffers_work(world: World, device: torch.device) -> bool:
    """Whether a small Allreduce on device memory gives the right sum; collective."""
    probe = torch.full((4,), float(world.rank + 1), device=device)
    torch.cuda.synchronize(device)
    try:
        with world.wait_limit:
            world.comm.Allreduce(MPI.IN_PLACE, probe)
    except (MPI.Exception, TypeError, ValueError):
        return False
    return bool((probe == world.size * (world.size + 1) / 2).all())
