"""Convolutions of C models as products whose columns are never written: each tile gathers its own from the map.

For maps whose channels fill a tile. Weights and their gradient are strided views [C, rows, out] of the flat
vectors, rows in (tap, channel) order, the taps that meet data alone. The specification is columns times weights
in ``ops.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import col2im
from .triton_support import check, jit, tl, triton

PROGRAMS = 36  # of one client's weight gradient; fewer tiles than this are cut along the pixels
SUM_TILE = 1024


def supported(channels: int, out: int) -> bool:
    return channels % 64 == 0 and out % 64 == 0


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@jit
def _source(image, h, w, tap, TAPS_W: tl.constexpr, H: tl.constexpr, W: tl.constexpr, SIGN: tl.constexpr):
    """The pixel that ``tap`` of a window at (h, w) meets, and whether it lies in the map."""
    h += SIGN * (tap // TAPS_W)
    w += SIGN * (tap % TAPS_W)
    return (image * H + h) * W + w, (h >= 0) & (h < H) & (w >= 0) & (w < W)


@jit(do_not_specialize=["pixels"])
def _forward(
    x, weight, bias, out, pixels, stride, bias_stride, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, OUT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    STRIDE: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) // (OUT // N) * M + tl.arange(0, M)
    n = tl.program_id(0) % (OUT // N) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    image, place = m // (OUT_H * OUT_W), m % (OUT_H * OUT_W)
    h, w = place // OUT_W * STRIDE - TOP, place % OUT_W * STRIDE - LEFT
    x += client * (pixels // (OUT_H * OUT_W)) * (H * W * CHANNELS)
    weight += client * stride
    total = tl.zeros([M, N], tl.float32)
    for step in range(TAPS_H * TAPS_W * (CHANNELS // K)):
        tap, channel = step // (CHANNELS // K), step % (CHANNELS // K) * K
        pixel, met = _source(image, h, w, tap, TAPS_W, H, W, 1)
        a = tl.load(
            x + (pixel * CHANNELS + channel)[:, None] + k[None, :], mask=(met & (m < pixels))[:, None], other=0.0
        )
        row = tap * CHANNELS + channel + k
        b = tl.load(weight + row[:, None] * OUT + n[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + client * bias_stride + n).to(tl.float32)[None, :]
    out += client * pixels * OUT
    tl.store(out + m[:, None] * OUT + n[None, :], total.to(out.dtype.element_ty), mask=(m < pixels)[:, None])


def _geometry(window) -> tuple[int, ...]:
    (r0, r1), (c0, c1) = window.taps
    return window.padding - r0, window.padding - c0, window.stride, r1 - r0, c1 - c0


def _tile(kind: str, pixels: int, x: Tensor) -> tuple[int, int, int, int, int]:
    """Tile [M, N], its inner step K, warps and stages, by the kind of product and the pixels of an image's map."""
    step = 128 // x.element_size()
    if kind == "weight":
        return 64, 64, step, 4, 4
    return 128 if pixels > 16 else 64, 64, step, 4, 4


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, window) -> Tensor:
    count, n, rows, columns, channels = x.shape
    (h, w), out_channels = window.out, weight.shape[-1]
    x = x.contiguous()
    out = x.new_empty(count, n, h, w, out_channels)
    check("a convolution", x, out)
    *tile, warps, stages = _tile("forward", h * w, x)
    _forward[(triton.cdiv(n * h * w, tile[0]) * (out_channels // tile[1]), count)](
        x, weight, bias, out, n * h * w, weight.stride(0), 0 if bias is None else bias.stride(0), rows, columns,
        channels, h, w, out_channels, *_geometry(window), _precision(), *tile, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@jit(do_not_specialize=["pixels"])
def _input_gradient(
    dout, weight, dx, pixels, stride, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, OUT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    STRIDE: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) // (CHANNELS // N) * M + tl.arange(0, M)
    n = tl.program_id(0) % (CHANNELS // N) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    image, place = m // (H * W), m % (H * W)
    h, w = place // W + TOP, place % W + LEFT
    dout += client * (pixels // (H * W)) * (OUT_H * OUT_W * OUT)
    weight += client * stride
    total = tl.zeros([M, N], tl.float32)
    for step in range(TAPS_H * TAPS_W * (OUT // K)):
        tap, channel = step // (OUT // K), step % (OUT // K) * K
        pixel, met = _source(image, h, w, tap, TAPS_W, OUT_H, OUT_W, -1)
        a = tl.load(dout + (pixel * OUT + channel)[:, None] + k[None, :], mask=(met & (m < pixels))[:, None], other=0.0)
        row = tap * CHANNELS + n
        b = tl.load(weight + row[None, :] * OUT + (channel + k)[:, None])
        total = tl.dot(a, b, total, input_precision=PRECISION)
    dx += client * pixels * CHANNELS
    tl.store(dx + m[:, None] * CHANNELS + n[None, :], total.to(dx.dtype.element_ty), mask=(m < pixels)[:, None])


def input_gradient(dout: Tensor, weight: Tensor, window, shape: torch.Size) -> Tensor:
    count, n, rows, columns, channels = shape
    (h, w), out_channels = window.out, weight.shape[-1]
    dout = dout.contiguous()
    if window.stride > 1:
        # Each pixel meets its own few taps, so there is no one product; the columns are small.
        return col2im(torch.bmm(dout.view(count, n * h * w, out_channels), weight.mT), window, shape)
    dx = dout.new_empty(shape)
    check("a convolution", dx, dout)
    *tile, warps, stages = _tile("input", rows * columns, dout)
    _input_gradient[(triton.cdiv(n * rows * columns, tile[0]) * (channels // tile[1]), count)](
        dout, weight, dx, n * rows * columns, weight.stride(0), rows, columns, channels, h, w, out_channels,
        *_geometry(window), _precision(), *tile, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx


@jit(do_not_specialize=["pixels"])
def _weight_gradient(
    x, dout, grad, pixels, stride, part_stride, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, OUT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    STRIDE: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    client, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    tap = tl.program_id(0) % (TAPS_H * TAPS_W)
    block = tl.program_id(0) // (TAPS_H * TAPS_W)
    m = block // (OUT // N) * M + tl.arange(0, M)
    n = block % (OUT // N) * N + tl.arange(0, N)
    share = (pixels + tl.num_programs(2) * K - 1) // (tl.num_programs(2) * K) * K
    end = tl.minimum(share * (part + 1), pixels)
    x += client * (pixels // (OUT_H * OUT_W)) * (H * W * CHANNELS)
    dout += client * pixels * OUT
    total = tl.zeros([M, N], tl.float32)
    for begin in range(share * part, end, K):
        k = begin + tl.arange(0, K)
        image, place = k // (OUT_H * OUT_W), k % (OUT_H * OUT_W)
        h, w = place // OUT_W * STRIDE - TOP, place % OUT_W * STRIDE - LEFT
        pixel, met = _source(image, h, w, tap, TAPS_W, H, W, 1)
        a = tl.load(x + (pixel * CHANNELS)[:, None] + m[None, :], mask=(met & (k < end))[:, None], other=0.0)
        b = tl.load(dout + (k * OUT)[:, None] + n[None, :], mask=(k < end)[:, None], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    row = tap * CHANNELS + m
    grad += client * stride + part * part_stride
    tl.store(grad + row[:, None] * OUT + n[None, :], total.to(grad.dtype.element_ty))


@jit
def _add_parts(parts, grad, stride, PARTS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    parts += client * (PARTS * SIZE)
    total = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(grad + client * stride + at, total.to(grad.dtype.element_ty), mask=at < SIZE)


def weight_gradient(x: Tensor, dout: Tensor, grad: Tensor, window) -> None:
    count, n, rows, columns, channels = x.shape
    (h, w), out_channels = window.out, dout.shape[-1]
    x, dout = x.contiguous(), dout.contiguous()
    check("a convolution", x, dout)
    geometry = _geometry(window)
    *tile, warps, stages = _tile("weight", h * w, x)
    programs = geometry[-1] * geometry[-2] * (channels // tile[0]) * (out_channels // tile[1])
    parts = triton.cdiv(PROGRAMS, programs)
    target, stride, part_stride = grad, grad.stride(0), 0
    if parts > 1:
        size = grad[0].numel()
        target = torch.empty(count, parts, size, dtype=torch.float32, device=x.device)
        stride, part_stride = parts * size, size
    _weight_gradient[(programs, count, parts)](
        x, dout, target, n * h * w, stride, part_stride, rows, columns, channels, h, w, out_channels, *geometry,
        _precision(), *tile, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        _add_parts[(triton.cdiv(size, SUM_TILE), count)](target, grad, grad.stride(0), parts, size, SUM_TILE)
