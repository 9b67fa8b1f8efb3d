"""The device that a rank computes on, the precision of its products, and the CPU's threads and memory."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import torch

from ..mpi import World
from ..settings import Config
from ..support.errors import UserError
from ..support.processes import bound_cores, core_limit


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
    """Ranks that a launcher bound see their own cores; unbound ones share the node's, and all a container's limit."""
    cores = bound_cores()
    sharing = world.node.size if cores >= (os.cpu_count() or 1) else 1
    return max(1, int(min(cores / sharing, core_limit() / world.node.size)))


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
    if precision == "bf16" and onednn_refuses_bf16():
        # As torch does by itself, with a warning, at the first product that oneDNN refuses; its own kernels follow.
        set_onednn(False)
    for attention in FUSED_ATTENTION:
        set_attention(attention, False)
    torch.backends.mha.set_fastpath_enabled(False)  # of evaluation, which vmap does not take
    return torch.float64 if precision == "fp64" else torch.float32


# Their gradients add up in no fixed order on a GPU, or draw numbers of their own; products and a softmax do neither.
FUSED_ATTENTION = ("flash", "mem_efficient", "cudnn")


def set_attention(kind: str, enabled: bool) -> None:
    """Whether torch may use one of its fused kernels of attention; some versions do not have them all."""
    getattr(torch.backends.cuda, f"enable_{kind}_sdp", lambda enabled: None)(enabled)


def attention_enabled(kind: str) -> bool:
    return bool(getattr(torch.backends.cuda, f"{kind}_sdp_enabled", lambda: False)())


def refuse_unrepeatable(refuse: bool) -> None:
    """Whether torch refuses operations on a GPU that may give other bits each time."""
    if torch.are_deterministic_algorithms_enabled() == refuse:
        return  # the call below imports torch's compiler, which takes seconds
    if refuse:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch refuses products
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # as would take time in every step
    torch.use_deterministic_algorithms(refuse)


def set_onednn(enabled: bool) -> None:
    """Whether torch may compute with oneDNN on the CPU."""
    switches: Any = torch.backends.mkldnn
    switches.enabled = enabled


def onednn_refuses_bf16() -> bool:
    """Whether torch has oneDNN, and that has no bf16 products for this CPU: x86 before AVX-512, ARM without BF16."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and not supported()


AMPERE = (8, 0)  # the first compute capability with tensor cores for TF32 and bf16
CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}  # of x86, then of ARM


def arithmetic(precision: str, device: torch.device) -> str:
    """What is computed in which type, for the banner."""
    if precision == "tf32":
        if device.type == "cpu":
            return "fp32 (tf32 is for GPUs)"
        return "tf32 products, all else fp32" if _tensor_cores(device) else "fp32 (this GPU has no tf32)"
    return "bf16 forward and backward, fp32 states and sums" if precision == "bf16" else precision


def precision_notes(precision: str, device: torch.device) -> list[str]:
    """What a user should know of ``precision`` on this device."""
    if precision != "bf16" or (_tensor_cores(device) if device.type == "cuda" else _bf16_instructions()):
        return []
    lacks = "GPU has no bf16 tensor cores" if device.type == "cuda" else "CPU has no bf16 instructions"
    return [f"this {lacks}: bf16 is emulated, --precision fp32 is faster"]


def _tensor_cores(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= AMPERE


def _bf16_instructions() -> bool:
    flags = cpu_flags()
    return not flags.isdisjoint(BF16_FLAGS) if flags else not onednn_refuses_bf16()


def cpu_flags() -> set[str]:
    """The features of the processor, as Linux names them; empty where they are not known."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "").split())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
