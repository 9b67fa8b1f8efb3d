"""Convolutions with a kernel of its own for every channel: forward, and the gradients of input and weights."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from .sum_kernels import column_sums
from .triton_support import TILE, Window, await_inputs, check, jit, own_channels, power, tl, triton


@jit
def _tile(CHANNELS: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr):
    """The program's pixels [PIXELS, 1] and channels [1, LANES]."""
    part, channel = own_channels(CHANNELS, LANES)
    return part * PIXELS + tl.arange(0, PIXELS)[:, None], channel


@jit(do_not_specialize=["pixels", "weight_stride", "bias_stride"])
def _forward(
    x, weight, bias, out, pixels, weight_stride, bias_stride, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, STRIDE: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    pixel, channel = _tile(CHANNELS, PIXELS, LANES)
    inside = (pixel < pixels) & (channel < CHANNELS)
    image, place = pixel // (OUT_H * OUT_W), pixel % (OUT_H * OUT_W)
    top, left = place // OUT_W * STRIDE - TOP, place % OUT_W * STRIDE - LEFT
    x += client * (pixels // (OUT_H * OUT_W)) * (H * W * CHANNELS)
    weight += client * weight_stride
    total = tl.zeros([PIXELS, LANES], tl.float32)
    if bias is not None:
        total += tl.load(bias + client * bias_stride + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    for i in range(KERNEL_H):
        for j in tl.static_range(KERNEL_W):
            h, w, tap = top + i, left + j, i * KERNEL_W + j
            valid = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            value = tl.load(x + ((image * H + h) * W + w) * CHANNELS + channel, mask=valid, other=0.0).to(tl.float32)
            factor = tl.load(weight + tap * CHANNELS + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
            total += value * factor
    tl.store(out + client * pixels * CHANNELS + pixel * CHANNELS + channel, total.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["pixels", "weight_stride"])
def _input_gradient(
    dout, weight, dx, pixels, weight_stride, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, STRIDE: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    pixel, channel = _tile(CHANNELS, PIXELS, LANES)
    inside = (pixel < pixels) & (channel < CHANNELS)
    image, place = pixel // (H * W), pixel % (H * W)
    bottom, right = place // W + TOP, place % W + LEFT
    dout += client * (pixels // (H * W)) * (OUT_H * OUT_W * CHANNELS)
    weight += client * weight_stride
    total = tl.zeros([PIXELS, LANES], tl.float32)
    if STRIDE == 1:
        for i in range(KERNEL_H):
            for j in tl.static_range(KERNEL_W):
                h, w, tap = bottom - i, right - j, i * KERNEL_W + j
                valid = inside & (h >= 0) & (h < OUT_H) & (w >= 0) & (w < OUT_W)
                source = ((image * OUT_H + h) * OUT_W + w) * CHANNELS + channel
                value = tl.load(dout + source, mask=valid, other=0.0).to(tl.float32)
                factor = tl.load(weight + tap * CHANNELS + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
                total += value * factor
    else:  # few taps see a pixel, others its neighbours
        for i in range((KERNEL_H + STRIDE - 1) // STRIDE):
            for j in tl.static_range((KERNEL_W + STRIDE - 1) // STRIDE):
                h, tap_h = bottom // STRIDE - i, bottom % STRIDE + i * STRIDE
                w, tap_w = right // STRIDE - j, right % STRIDE + j * STRIDE
                valid = inside & (h >= 0) & (h < OUT_H) & (tap_h < KERNEL_H)
                valid &= (w >= 0) & (w < OUT_W) & (tap_w < KERNEL_W)
                source = ((image * OUT_H + h) * OUT_W + w) * CHANNELS + channel
                value = tl.load(dout + source, mask=valid, other=0.0).to(tl.float32)
                tap = tap_h * KERNEL_W + tap_w
                factor = tl.load(weight + tap * CHANNELS + channel, mask=valid, other=0.0).to(tl.float32)
                total += value * factor
    tl.store(dx + client * pixels * CHANNELS + pixel * CHANNELS + channel, total.to(dx.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["pixels", "chunks"])
def _weight_gradient(
    x, dout, partial, pixels, chunks, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, OUT_H: tl.constexpr,
    OUT_W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, STRIDE: tl.constexpr, KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr, PIXELS: tl.constexpr, TAPS: tl.constexpr, LANES: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """The sums over PIXELS output pixels of a client."""
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    chunk, channel = own_channels(CHANNELS, LANES)
    tap = tl.arange(0, TAPS)[:, None]
    known = (tap < KERNEL_H * KERNEL_W) & (channel < CHANNELS)
    x += client * (pixels // (OUT_H * OUT_W)) * (H * W * CHANNELS)
    dout += client * pixels * CHANNELS
    total = tl.zeros([TAPS, LANES], tl.float32)
    down, right = tap // KERNEL_W - TOP, tap % KERNEL_W - LEFT
    for begin in range(chunk * PIXELS, (chunk + 1) * PIXELS, UNROLLED):
        for i in tl.static_range(UNROLLED):
            pixel = tl.zeros([1, 1], tl.int32) + (begin + i)
            image, place = pixel // (OUT_H * OUT_W), pixel % (OUT_H * OUT_W)
            h, w = place // OUT_W * STRIDE + down, place % OUT_W * STRIDE + right
            valid = known & (pixel < pixels) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            value = tl.load(x + ((image * H + h) * W + w) * CHANNELS + channel, mask=valid, other=0.0).to(tl.float32)
            seen = (pixel < pixels) & (channel < CHANNELS)
            total += value * tl.load(dout + pixel * CHANNELS + channel, mask=seen, other=0.0).to(tl.float32)
    partial += (client * chunks + chunk) * (KERNEL_H * KERNEL_W * CHANNELS)
    tl.store(partial + tap * CHANNELS + channel, total, mask=known)


@jit(do_not_specialize=["pixels", "chunks"])
def _few_taps_gradient(
    x, dout, partial, pixels, chunks, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, OUT_H: tl.constexpr,
    OUT_W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, STRIDE: tl.constexpr, KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr, PIXELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """As ``_weight_gradient`` for small kernels: all pixels at once, one tap after another."""
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    chunk, channel = own_channels(CHANNELS, LANES)
    pixel = chunk * PIXELS + tl.arange(0, PIXELS)[:, None]
    inside = (pixel < pixels) & (channel < CHANNELS)
    image, place = pixel // (OUT_H * OUT_W), pixel % (OUT_H * OUT_W)
    top, left = place // OUT_W * STRIDE - TOP, place % OUT_W * STRIDE - LEFT
    x += client * (pixels // (OUT_H * OUT_W)) * (H * W * CHANNELS)
    dout += client * pixels * CHANNELS
    partial += (client * chunks + chunk) * (KERNEL_H * KERNEL_W * CHANNELS)
    gradient = tl.load(dout + pixel * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    for i in range(KERNEL_H):
        for j in tl.static_range(KERNEL_W):
            h, w = top + i, left + j
            valid = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            value = tl.load(x + ((image * H + h) * W + w) * CHANNELS + channel, mask=valid, other=0.0).to(tl.float32)
            total = tl.sum(value * gradient, 0, keep_dims=True)
            tl.store(partial + (i * KERNEL_W + j) * CHANNELS + channel, total, mask=channel < CHANNELS)


def _geometry(shape: torch.Size, window: Window) -> tuple[int, ...]:
    """What is a constant to kernels: the shape of maps [C, N, rows, columns, channels] and the window over them."""
    return *shape[2:], *window.out, *window.padding, window.stride[0], *window.kernel


def _lanes(channels: int, most: int) -> int:
    """Channels of a program: a part of all of them, so that none is computed for nothing, unless that were few."""
    lanes = gcd(channels, most)
    return lanes if lanes >= 16 else min(power(channels), most)


def _tile_size(channels: int) -> tuple[int, int]:
    """Pixels and channels of a program; few channels, so that the pixels around stay in its processor's cache."""
    lanes = _lanes(channels, 32)
    return TILE // lanes, lanes


def _warps(x: Tensor) -> int:
    """Of a program with such a tile: half the bytes per element take half the threads."""
    return 2 * x.element_size()


def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Of maps [C, N, rows, columns, channels] with weights [C, taps or more, channels]."""
    count, n, *_, channels = x.shape
    out = x.new_empty(count, n, *window.out, channels)
    check("depthwise convolution", x, out)
    pixels, (at_once, lanes) = n * window.out[0] * window.out[1], _tile_size(channels)
    grid = (triton.cdiv(pixels, at_once) * triton.cdiv(channels, lanes), count)
    strides = (weight.stride(0), 0 if bias is None else bias.stride(0))
    _forward[grid](
        x, weight, bias, out, pixels, *strides, *_geometry(x.shape, window), at_once, lanes, num_warps=_warps(x)
    )
    return out


def depthwise_input_gradient(dout: Tensor, weight: Tensor, window: Window, shape: torch.Size) -> Tensor:
    count, n, rows, columns, channels = shape
    dx = dout.new_empty(shape)
    check("depthwise convolution", dx, dout)
    pixels, (at_once, lanes) = n * rows * columns, _tile_size(channels)
    grid = (triton.cdiv(pixels, at_once) * triton.cdiv(channels, lanes), count)
    _input_gradient[grid](
        dout, weight, dx, pixels, weight.stride(0), *_geometry(shape, window), at_once, lanes, num_warps=_warps(dx)
    )
    return dx


FEW_TAPS = 9
PIXELS = 64  # of a program that sums weight gradients of many taps
UNROLLED = 4  # of them at a time, so that loads overlap


def depthwise_weight_gradient(grad: Tensor, x: Tensor, dout: Tensor, window: Window) -> None:
    """Into ``grad`` [C, taps or more, channels]."""
    count, n, *_, channels = x.shape
    taps, pixels = window.kernel[0] * window.kernel[1], n * window.out[0] * window.out[1]
    check("depthwise convolution", x, dout)
    few = taps <= FEW_TAPS
    if few:
        lanes = _lanes(channels, 64)
        at_once = TILE // lanes
    else:
        lanes = min(power(channels), max(2 * TILE // (x.element_size() * power(taps)), 16))
        at_once = PIXELS
    chunks = triton.cdiv(pixels, at_once)
    partial = torch.empty(count, chunks, taps, channels, dtype=torch.float32, device=x.device)
    grid = (chunks * triton.cdiv(channels, lanes), count)
    arguments = (x, dout, partial, pixels, chunks, *_geometry(x.shape, window), at_once)
    if few:
        # A warp's sums need not wait for another's.
        _few_taps_gradient[grid](*arguments, lanes, num_warps=x.element_size() // 2)
    else:
        _weight_gradient[grid](*arguments, power(taps), lanes, UNROLLED)
    column_sums(grad.view(count, -1)[:, : taps * channels], partial.view(count, chunks, taps * channels))
