"""The device that a rank computes on, the precision of its products, and the CPU's threads and memory."""

from __future__ import annotations

import ctypes
import os
import platform

import torch

from .config import Config
from .errors import UserError
from .mpi import World
from .processes import usable_cores


def uses_gpu(config: Config) -> bool:
    return config.device != "cpu" and torch.cuda.is_available()


def choose_device(world: World, config: Config, threads: int = 0) -> torch.device:
    """A GPU by local rank (several ranks may share one), or the CPU with ``threads`` (0: its share of the cores)."""
    if config.device == "cuda" and not uses_gpu(config):
        raise UserError(
            "--device cuda: torch sees no GPU here; use --device cpu, or check CUDA_VISIBLE_DEVICES and the driver"
        )
    if uses_gpu(config):
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or share_of_cores(world))
    return device


def asked_threads(world: World) -> int:
    """The root's OMP_NUM_THREADS, 0 if it has none; mpirun does not pass it on to other nodes. Collective."""
    text = world.broadcast_json({"threads": os.environ.get("OMP_NUM_THREADS", "")})["threads"]
    return int(text) if text.isdecimal() and len(text) < 5 else 0


def share_of_cores(world: World) -> int:
    """Ranks that a launcher bound see their own cores; unbound ones share the node's."""
    cores = usable_cores()
    sharing = world.node.size if cores >= (os.cpu_count() or 1) else 1
    return max(1, cores // sharing)


# Multiply-adds of a step that keep one thread busy; below, waking and joining a second one takes longer than it saves.
THREAD_WORK = 100_000_000


def limit_threads(world: World, device: torch.device, work: int, threads: int = 0) -> None:
    """On a CPU, no more threads than a step of ``work`` multiply-adds pays for; ``threads`` and OMP_NUM_THREADS win."""
    if device.type == "cpu" and not threads and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(share_of_cores(world), work // THREAD_WORK)))


def keep_freed_memory() -> None:
    """Let glibc keep freed pages: a step's large temporaries come back at every step, and clearing them takes time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)


def release_freed_memory() -> None:
    """Give back what ``keep_freed_memory`` has kept, and use the largest thresholds that glibc sets by itself."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        mmap_max, mmap_threshold, trim_threshold = -4, -3, -1
        libc.mallopt(mmap_max, 65536)
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 64 << 20)
        libc.malloc_trim(0)


def set_precision(precision: str) -> torch.dtype:
    """The type of parameters and states; what products are computed in is a global of torch."""
    tf32 = precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    return torch.float64 if precision == "fp64" else torch.float32


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
