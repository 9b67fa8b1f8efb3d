"""Convolutions of many models as products whose columns are read where they are in the map.

For kernels that keep a map's size, of whole blocks of channels: a part of the sum then has one tap, which reads the map
at one distance. The columns of a 3x3 kernel are nine times the map; written and read, they cost more than the product.
"""

from __future__ import annotations

from math import gcd, prod

from torch import Tensor

from .limits import MOST_ELEMENTS
from .product_kernels import AT_ONCE, STAGES, Tiling, computes
from .triton_support import Window, await_inputs, jit, launches_overlap, live_taps, tl, triton

# Terms of a pixel's sum up to which this is faster than columns: a program of few rows reads all weights once.
TERMS = {2: 1152, 4: 576}  # by bytes of a number


@jit(do_not_specialize=["pixels"])
def _convolution(
    x, weight, out, pixels, weight_stride, H: tl.constexpr, W: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, BACKWARD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From x [C, pixels, IN] to out [C, pixels, OUT]; backward, from the result's gradient to the map's."""
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    ACROSS: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    BLOCKS: tl.constexpr = IN // DEPTH
    pixel = tl.program_id(0) // ACROSS * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    h, w = pixel % (H * W) // W, pixel % W
    x += client * pixels * IN
    weight += client * weight_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.range(0, TAPS_H * TAPS_W * BLOCKS, num_stages=STAGES):
        tap, k = part // BLOCKS, part % BLOCKS * DEPTH + tl.arange(0, DEPTH)
        down, right = tap // TAPS_W - TOP, tap % TAPS_W - LEFT
        if BACKWARD:
            down, right = -down, -right
            at = (tap * OUT + column) * IN + k[:, None]
        else:
            at = (tap * IN + k[:, None]) * OUT + column
        inside = (pixel < pixels) & (h + down >= 0) & (h + down < H) & (w + right >= 0) & (w + right < W)
        place = (pixel + down * W + right)[:, None] * IN + k[None, :]
        values = tl.load(x + place, mask=inside[:, None], other=0.0)
        total = tl.dot(values, tl.load(weight + at, mask=column < OUT, other=0.0), total, input_precision="tf32")
    at = client * pixels * OUT + pixel[:, None] * OUT + column
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(pixel[:, None] < pixels) & (column < OUT))


def convolves(x: Tensor, window: Window, weight: Tensor) -> bool:
    """Whether ``convolution`` is faster than columns of x [C, N, rows, columns, channels], by their shapes alone."""
    (_, *pixels, channels), (terms, out) = x.shape, weight.shape[1:]
    _, _, height, width = live_taps(window)
    whole = window.keeps_size and terms == height * width * channels and gcd(channels, out) % 32 == 0
    within = prod(pixels) * max(channels, out) < MOST_ELEMENTS and weight[0].is_contiguous()
    return launches_overlap() and whole and within and computes(x, weight) and terms <= TERMS[x.element_size()]


def _tiling_of(pixels: int, out: int, channels: int, count: int, size: int, backward: bool) -> Tiling:
    """As small as leaves no more programs than a GPU takes at once, or large: measured on an H200."""

    def tiles(rows: int, columns: int) -> int:
        return triton.cdiv(pixels, rows) * triton.cdiv(out, columns) * count

    if size == 4 and not backward:  # not for Hopper's own instructions
        return Tiling(32, 32 if tiles(32, 64) <= AT_ONCE else 64, 32)
    depth = 64 if size == 2 and channels % 64 == 0 else 32
    if tiles(64, 32) <= 2 * AT_ONCE:
        return Tiling(64, 32, depth)
    return Tiling(128, 64, depth) if out <= 64 else Tiling(64, 128, depth)


def convolution(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """x [C, N, rows, columns, channels] with weights [C, taps * channels, out], where ``convolves``."""
    return _convolved(x.contiguous(), weight, window, weight.shape[2], False)


def convolution_input_gradient(dout: Tensor, weight: Tensor, window: Window) -> Tensor:
    """That of the map, from the result's [C, N, rows, columns, out]."""
    _, _, height, width = live_taps(window)
    return _convolved(dout.contiguous(), weight, window, weight.shape[1] // (height * width), True)


def _convolved(x: Tensor, weight: Tensor, window: Window, width: int, backward: bool) -> Tensor:
    count, n, rows, columns, channels = x.shape
    out, pixels = x.new_empty(*x.shape[:-1], width), n * rows * columns
    tiling = _tiling_of(pixels, width, channels, count, x.element_size(), backward)
    _convolution[(tiling.tiles(pixels, width), count)](
        x, weight, out, pixels, weight.stride(0), rows, columns, channels, width, *live_taps(window), backward,
        tiling.rows, tiling.columns, tiling.depth, STAGES, num_warps=4,
    )  # fmt: skip
    return out
