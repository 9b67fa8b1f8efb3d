"""What all kernels share: Triton if it is installed, and how work is cut into programs."""

from __future__ import annotations

import os
from functools import cache, partial
from math import gcd
from typing import Any, Protocol

import torch

from .limits import MOST_ELEMENTS, TooManyElements

# A product and a sum rounded once, as in torch's own kernels; without a choice Triton 3.9 warns on every rank.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton
    import triton.language as tl
    from triton import jit as _jit
except ImportError:
    triton = tl = None
try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.language.target_info import cuda_capability_geq
except ImportError:  # also of an older Triton
    gdc_wait = None

# A kernel is launched while the one before it ends (programmatic dependent launch, from compute capability 9 on), and
# waits for its results by itself: saves the GPU's time between two kernels, a tenth of a round of one small client.
CAN_AWAIT = gdc_wait is not None and os.environ.get("TRITON_INTERPRET") != "1"


def jit(fn: Any = None, **options: Any) -> Any:
    """``triton.jit``; a kernel begins with ``await_inputs()``, which the way of its launch relies on,
    or with what it only fetches."""
    if fn is None:
        return partial(jit, **options)
    if triton is None:
        return fn
    kernel = _jit(fn, **options)
    if CAN_AWAIT and isinstance(kernel, triton.JITFunction):
        kernel.run = partial(_launch, kernel)
    return kernel


def _launch(kernel: Any, *arguments: Any, **options: Any) -> Any:
    return type(kernel).run(kernel, *arguments, **_launch_options(), **options)


def launches_overlap() -> bool:
    """Whether our kernels are launched while the one before them runs."""
    return CAN_AWAIT and _launch_options().get("launch_pdl", False)


@cache
def _launch_options() -> dict[str, bool]:
    """Of all our kernels; none where there is no GPU."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions

        target = triton.runtime.driver.active.get_current_target()
    except (ImportError, RuntimeError):
        return {}
    options = {}
    if target.backend == "cuda" and target.arch >= 90 and hasattr(CUDAOptions, "launch_pdl"):
        options["launch_pdl"] = True
    # Only debugging keeps Triton's checks of integers, but they are always made: a fifth of the time for which
    # compiling holds Python's global lock.
    if target.backend == "cuda" and hasattr(CUDAOptions, "sanitize_overflow"):
        options["sanitize_overflow"] = False
    return options


if CAN_AWAIT:

    @jit
    def await_inputs() -> None:
        """Wait for what was launched before, and let the next kernel be launched; it waits for this one."""
        if cuda_capability_geq(9, 0):
            gdc_wait()
            gdc_launch_dependents()

    @jit
    def fetch(addresses):  # type: ignore[no-untyped-def]
        """Have the GPU's cache get what is there: no result, so also before ``await_inputs``."""
        if cuda_capability_geq(9, 0):
            command: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
            tl.inline_asm_elementwise(command, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)

    @jit
    def _instruction(NAME: tl.constexpr, value):  # type: ignore[no-untyped-def]
        """A single one on float32, whose result is 0 where it is no normal number."""
        return tl.inline_asm_elementwise(NAME + " $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)

    @jit
    def exp2(value):  # type: ignore[no-untyped-def]
        """2 to the power of a float32; ``tl.exp2`` is four instructions."""
        if cuda_capability_geq(8, 0):
            value = _instruction("ex2.approx.ftz.f32", value)
        else:
            value = tl.exp2(value)
        return value

    @jit
    def inverse(value):  # type: ignore[no-untyped-def]
        """1 over a float32; a division is eight instructions."""
        if cuda_capability_geq(8, 0):
            value = _instruction("rcp.approx.ftz.f32", value)
        else:
            value = 1 / value
        return value

else:

    @jit
    def await_inputs() -> None:
        pass

    @jit
    def fetch(addresses) -> None:  # type: ignore[no-untyped-def]
        pass

    @jit
    def exp2(value):  # type: ignore[no-untyped-def]
        return tl.exp2(value)

    @jit
    def inverse(value):  # type: ignore[no-untyped-def]
        return 1 / value


@jit
def own_channels(WIDTH: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The program's number among those over the same channels, and these channels [1, LANES].

    Both along the first axis of the grid, as a GPU takes at most 65,535 programs along the others.
    """
    blocks: tl.constexpr = (WIDTH + LANES - 1) // LANES
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * LANES + tl.arange(0, LANES)[None, :]


__all__ = [
    "LOG2_E",
    "TILE",
    "Window",
    "available",
    "await_inputs",
    "check",
    "exp2",
    "fetch",
    "inverse",
    "jit",
    "launches_overlap",
    "live_taps",
    "own_channels",
    "power",
    "tl",
    "triton",
    "vector",
]

TILE = 2048  # elements per program
LOG2_E: Any = tl.constexpr(1.4426950408889634) if tl else None


class Window(Protocol):
    """What the kernels need of ``models.columns.Window``."""

    @property
    def kernel(self) -> tuple[int, int]: ...

    @property
    def stride(self) -> tuple[int, int]: ...

    @property
    def padding(self) -> tuple[int, int]: ...

    @property
    def out(self) -> tuple[int, int]: ...

    @property
    def taps(self) -> tuple[tuple[int, int], tuple[int, int]]: ...

    @property
    def pointwise(self) -> bool: ...

    @property
    def keeps_size(self) -> bool: ...


def available() -> bool:
    """Whether kernels can run: on a CUDA device, or anywhere under TRITON_INTERPRET=1."""
    if triton is None:
        return False
    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def live_taps(window: Window) -> tuple[int, int, int, int]:
    """The pixels above and left of the first live tap's, and the rows and columns of live taps."""
    (r0, r1), (c0, c1) = window.taps
    return window.padding[0] - r0, window.padding[1] - c0, r1 - r0, c1 - c0


def power(value: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (value - 1).bit_length()


def vector(*widths: int) -> int:
    """The run of channels a row of a tile covers: whole 16-byte accesses wherever the channels allow."""
    return gcd(64, *widths)


def check(what: str, *tensors: torch.Tensor) -> None:
    """Refuse what would be computed wrongly: sums are float32, and indices within a client 32 bits wide."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{what}: got {tensor.dtype}, the kernels take float32, bfloat16 and float16")
        if (found := tensor[0].numel()) >= MOST_ELEMENTS:
            raise TooManyElements(f"{what}: got {found:,} numbers of a client, expected fewer than {MOST_ELEMENTS:,}")
