"""Triton kernels for single steps of the stacked layers, one launch each; ``models/layer_steps.py`` specifies them.

This module stands in for the plain functions of the same names. Geometry is known at compile time; the number of
clients, the images of each and the length of the flat vectors are not, so an uneven draw of clients compiles nothing
but norms with more warps, which few clients have. Sums are taken in float32 in a fixed order: no atomics, the same
bits every run. Tensors are float32, bfloat16 or float16, and one client's share of each has fewer than 2**31 elements.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attention_kernels import attention, takes_attention
from .channel_kernels import bias_activation, bias_activation_backward, scale, spread
from .convolution_kernels import convolution, convolution_input_gradient, convolves
from .depthwise_kernels import depthwise, depthwise_input_gradient, depthwise_weight_gradient
from .dropout_kernels import dropout
from .embedding_kernels import embedding_gradient
from .low_rank_kernels import (
    low_rank_activation,
    low_rank_activation_backward,
    low_rank_gradients,
    low_rank_product,
    takes_gradients,
)
from .norm_kernels import (
    group_norm,
    group_norm_backward,
    makes_columns,
    norm_columns,
    norm_columns_backward,
    row_norm_backward,
)
from .product_kernels import product
from .recurrent_kernels import gru, gru_backward, lstm, lstm_backward
from .row_norm_kernels import added_norm, added_norm_backward
from .sum_kernels import column_sums
from .triton_support import TILE, Window, available, await_inputs, check, jit, live_taps, power, tl, triton, vector
from .vocabulary_kernels import token_cross_entropy

__all__ = [
    "attention",
    "added_norm",
    "added_norm_backward",
    "available",
    "bias_activation",
    "bias_activation_backward",
    "col2im",
    "column_sums",
    "convolution",
    "convolution_input_gradient",
    "convolves",
    "cross_entropy",
    "depthwise",
    "depthwise_input_gradient",
    "depthwise_weight_gradient",
    "dropout",
    "embedding_gradient",
    "gather",
    "group_norm",
    "group_norm_backward",
    "gru",
    "gru_backward",
    "im2col",
    "lstm",
    "lstm_backward",
    "low_rank_activation",
    "low_rank_activation_backward",
    "low_rank_gradients",
    "low_rank_product",
    "makes_columns",
    "max_pool",
    "norm_columns",
    "norm_columns_backward",
    "product",
    "row_norm_backward",
    "scale",
    "spread",
    "takes_attention",
    "takes_gradients",
    "token_cross_entropy",
]


@jit(do_not_specialize=["pixels"])
def _im2col(
    x, cols, pixels, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, STRIDE: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    WIDTH: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < pixels * (WIDTH // VECTOR)
    pixel, piece = row // (WIDTH // VECTOR), row % (WIDTH // VECTOR)
    tap, part = piece // (CHANNELS // VECTOR), piece % (CHANNELS // VECTOR)
    image, place = pixel // (OUT_H * OUT_W), pixel % (OUT_H * OUT_W)
    h = place // OUT_W * STRIDE + tap // TAPS_W - TOP
    w = place % OUT_W * STRIDE + tap % TAPS_W - LEFT
    valid = inside & (tap < TAPS_H * TAPS_W) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    lane = tl.arange(0, VECTOR)[None, :]
    x += client * (pixels // (OUT_H * OUT_W)) * (H * W * CHANNELS)
    source = ((image * H + h) * W + w) * CHANNELS + part * VECTOR
    value = tl.load(x + source[:, None] + lane, mask=valid[:, None], other=0.0)
    cols += client * pixels * WIDTH
    tl.store(cols + (row * VECTOR)[:, None] + lane, value, mask=inside[:, None])


@jit(do_not_specialize=["pixels"])
def _im2col_rows(
    x, cols, pixels, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, STRIDE: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
    WIDTH: tl.constexpr, RUNS: tl.constexpr, LANES: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """As ``_im2col`` for few channels: a run is a whole row of taps, or as much of the padding after them."""
    await_inputs()
    RUN: tl.constexpr = TAPS_W * CHANNELS
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None, None]
    tap = tl.arange(0, RUNS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    image, place = pixel // (OUT_H * OUT_W), pixel % (OUT_H * OUT_W)
    h = place // OUT_W * STRIDE - TOP
    w = place % OUT_W * STRIDE - LEFT
    inside = (pixel < pixels) & (lane < RUN) & (tap * RUN + lane < WIDTH)
    valid = inside & (tap < TAPS_H) & (h + tap >= 0) & (h + tap < H)
    valid = valid & (w + lane // CHANNELS >= 0) & (w + lane // CHANNELS < W)
    x += tl.program_id(1).to(tl.int64) * (pixels // (OUT_H * OUT_W)) * (H * W * CHANNELS)
    source = ((image * H + h) * W + w) * CHANNELS
    value = tl.load(x + source + (tap * (W * CHANNELS) + lane), mask=valid, other=0.0)
    cols += tl.program_id(1).to(tl.int64) * pixels * WIDTH
    tl.store(cols + pixel * WIDTH + (tap * RUN + lane), value, mask=inside)


def _geometry(shape: torch.Size, window: Window) -> tuple[int, ...]:
    """What is a constant to kernels: the shape of maps [C, N, rows, columns, channels] and the window over them."""
    top, left, rows, columns = live_taps(window)
    return *shape[2:], *window.out, top, left, window.stride[0], rows, columns


def im2col(x: Tensor, window: Window, width: int) -> Tensor:
    count, n, *_, channels = x.shape
    x, geometry, pixels = x.contiguous(), _geometry(x.shape, window), n * prod(window.out)
    if window.pointwise and channels == width:
        return x.view(count, pixels, channels)
    cols = x.new_empty(count, pixels, width)
    check("columns of a convolution", cols, x)
    if channels < 16:
        run = geometry[-1] * channels
        runs, lanes = power(triton.cdiv(width, run)), power(run)
        at_once = max(TILE // (runs * lanes), 1)
        _im2col_rows[(triton.cdiv(pixels, at_once), count)](x, cols, pixels, *geometry, width, runs, lanes, at_once)
    else:
        run = vector(channels, width)
        _im2col[(triton.cdiv(pixels * width, TILE), count)](x, cols, pixels, *geometry, width, run, TILE // run)
    return cols


@jit
def _runs(images, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr):
    """The program's ROWS runs of VECTOR channels in maps [C, images, H, W, CHANNELS]: which are inside, the place of
    each (image, row, column, run within the pixel), and the offsets of its elements."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < images * (H * W * CHANNELS // VECTOR)
    pixel, part = row // (CHANNELS // VECTOR), row % (CHANNELS // VECTOR)
    image, place = pixel // (H * W), pixel % (H * W)
    at = tl.program_id(1).to(tl.int64) * images * (H * W * CHANNELS) + (row * VECTOR)[:, None]
    return inside, image, place // W, place % W, part, at + tl.arange(0, VECTOR)[None, :]


@jit(do_not_specialize=["images"])
def _col2im(
    cols, dx, images, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, OUT_H: tl.constexpr,
    OUT_W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, STRIDE: tl.constexpr, TAPS_H: tl.constexpr,
    TAPS_W: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    await_inputs()
    inside, image, h, w, part, target = _runs(images, H, W, CHANNELS, VECTOR, ROWS)
    h, w = h + TOP, w + LEFT
    lane = tl.arange(0, VECTOR)[None, :]
    cols += tl.program_id(1).to(tl.int64) * images * (OUT_H * OUT_W * WIDTH)
    total = tl.zeros([ROWS, VECTOR], tl.float32)
    # Output i steps back from the last one that covers this pixel sees it through tap h % STRIDE + i * STRIDE.
    for i in tl.static_range((TAPS_H + STRIDE - 1) // STRIDE):
        for j in tl.static_range((TAPS_W + STRIDE - 1) // STRIDE):
            out_h, tap_h = h // STRIDE - i, h % STRIDE + i * STRIDE
            out_w, tap_w = w // STRIDE - j, w % STRIDE + j * STRIDE
            valid = inside & (out_h >= 0) & (out_h < OUT_H) & (tap_h < TAPS_H)
            valid = valid & (out_w >= 0) & (out_w < OUT_W) & (tap_w < TAPS_W)
            source = ((image * OUT_H + out_h) * OUT_W + out_w) * WIDTH
            source += (tap_h * TAPS_W + tap_w) * CHANNELS + part * VECTOR
            total += tl.load(cols + source[:, None] + lane, mask=valid[:, None], other=0.0)
    tl.store(dx + target, total.to(dx.dtype.element_ty), mask=inside[:, None])


def col2im(cols: Tensor, window: Window, shape: torch.Size) -> Tensor:
    geometry, width = _geometry(shape, window), cols.shape[-1]
    if window.pointwise and shape[-1] == width:
        return cols.view(shape)
    cols = cols.contiguous()
    dx = cols.new_empty(shape)
    check("columns of a convolution", cols, dx)
    run = vector(shape[-1], width)
    grid = (triton.cdiv(dx[0].numel(), TILE // 2), len(dx))
    _col2im[grid](cols, dx, shape[1], *geometry, width, run, TILE // 2 // run)
    return dx


@jit(do_not_specialize=["images"])
def _cross_entropy(
    logits, labels, weight, losses, dlogits, images, CLASSES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    await_inputs()
    client = tl.program_id(0)
    lane = tl.arange(0, LANES)[None, :]
    loss = tl.zeros([ROWS, 1], tl.float32)
    for begin in range(0, images, ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        image = client * images + row
        label = tl.load(labels + image, mask=row < images, other=0).to(tl.int32)
        share = tl.load(weight + image, mask=row < images, other=0.0)
        mask = (row < images) & (lane < CLASSES)
        value = tl.load(logits + image * CLASSES + lane, mask=mask, other=float("-inf")).to(tl.float32)
        value = tl.where(row < images, value, 0.0)
        value -= tl.max(value, 1, keep_dims=True)
        power = tl.exp(value)
        total = tl.sum(power, 1, keep_dims=True)
        right = lane == label
        loss += share * (tl.log(total) - tl.sum(tl.where(right, value, 0.0), 1, keep_dims=True))
        gradient = share * (power / total - tl.where(right, 1.0, 0.0))
        tl.store(dlogits + image * CLASSES + lane, gradient.to(dlogits.dtype.element_ty), mask=mask)
    tl.store(losses + client + tl.arange(0, 1)[:, None], tl.sum(loss, 0, keep_dims=True))


def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of every client, [C], and the gradient of their sum, for logits [C, N, classes]; ``weight`` is 0 for padding."""
    count, n, classes = logits.shape
    logits, labels, weight = (t.contiguous() for t in (logits, labels, weight))
    check("cross-entropy", logits)
    losses, dlogits = torch.empty(count, dtype=torch.float32, device=logits.device), torch.empty_like(logits)
    lanes = power(classes)
    rows = max(min(power(n), TILE // lanes), 1)
    _cross_entropy[(count,)](logits, labels, weight, losses, dlogits, n, classes, rows, lanes)
    return losses, dlogits


@jit(do_not_specialize=["images"])
def _max_pool(
    x, out, taken, images, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, OUT_H: tl.constexpr,
    OUT_W: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    await_inputs()
    inside, image, out_h, out_w, part, target = _runs(images, OUT_H, OUT_W, CHANNELS, VECTOR, ROWS)
    top, left = out_h * STRIDE - PADDING, out_w * STRIDE - PADDING
    lane = tl.arange(0, VECTOR)[None, :]
    x += tl.program_id(1).to(tl.int64) * images * (H * W * CHANNELS)
    best = tl.full([ROWS, VECTOR], float("-inf"), tl.float32)
    index = tl.full([ROWS, VECTOR], KERNEL * KERNEL, tl.int32)
    for i in tl.static_range(KERNEL):
        for j in tl.static_range(KERNEL):
            h, w = top + i, left + j
            valid = (inside & (h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
            source = ((image * H + h) * W + w) * CHANNELS + part * VECTOR
            value = tl.load(x + source[:, None] + lane, mask=valid, other=0.0).to(tl.float32)
            # The first tap inside the map starts the comparison, and NaN wins it, as in torch.
            better = valid & ((value > best) | (value != value) | (index == KERNEL * KERNEL))
            best = tl.where(better, value, best)
            index = tl.where(better, i * KERNEL + j, index)
    tl.store(out + target, best.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(taken + target, index.to(tl.uint8), mask=inside[:, None])


@jit(do_not_specialize=["images"])
def _max_pool_backward(
    dout, taken, dx, images, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, OUT_H: tl.constexpr,
    OUT_W: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    await_inputs()
    inside, image, h, w, part, target = _runs(images, H, W, CHANNELS, VECTOR, ROWS)
    h, w = h + PADDING, w + PADDING
    lane = tl.arange(0, VECTOR)[None, :]
    start = tl.program_id(1).to(tl.int64) * images * (OUT_H * OUT_W * CHANNELS)
    total = tl.zeros([ROWS, VECTOR], tl.float32)
    for i in tl.static_range((KERNEL + STRIDE - 1) // STRIDE):
        for j in tl.static_range((KERNEL + STRIDE - 1) // STRIDE):
            out_h, tap_h = h // STRIDE - i, h % STRIDE + i * STRIDE
            out_w, tap_w = w // STRIDE - j, w % STRIDE + j * STRIDE
            valid = inside & (out_h >= 0) & (out_h < OUT_H) & (tap_h < KERNEL)
            valid = (valid & (out_w >= 0) & (out_w < OUT_W) & (tap_w < KERNEL))[:, None]
            source = start + (((image * OUT_H + out_h) * OUT_W + out_w) * CHANNELS + part * VECTOR)[:, None] + lane
            index = tl.load(taken + source, mask=valid, other=255).to(tl.int32)
            value = tl.load(dout + source, mask=valid, other=0.0).to(tl.float32)
            total += tl.where(index == (tap_h * KERNEL + tap_w)[:, None], value, 0.0)
    tl.store(dx + target, total.to(dx.dtype.element_ty), mask=inside[:, None])


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kernel, stride, padding):
        count, n, rows, columns, channels = x.shape
        h, w = ((size + 2 * padding - kernel) // stride + 1 for size in (rows, columns))
        x = x.contiguous()
        out = x.new_empty(count, n, h, w, channels)
        taken = torch.empty_like(out, dtype=torch.uint8)
        check("max pool", x)
        run = vector(channels)
        ctx.geometry = (rows, columns, channels, h, w, kernel, stride, padding, run, TILE // 2 // run)
        _max_pool[(triton.cdiv(out[0].numel(), TILE // 2), count)](x, out, taken, n, *ctx.geometry)
        ctx.save_for_backward(taken)
        ctx.shape = x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        (taken,) = ctx.saved_tensors
        dx = dout.new_empty(ctx.shape)
        grid = (triton.cdiv(dx[0].numel(), TILE // 2), ctx.shape[0])
        _max_pool_backward[grid](dout.contiguous(), taken, dx, ctx.shape[1], *ctx.geometry)
        return dx, None, None, None


def max_pool(x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor:
    return _MaxPool.apply(x, kernel, stride or kernel, padding)


@jit(do_not_specialize=["batch"])
def _gather(
    images, index, flip, dy, dx, mean, std, out, batch, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    await_inputs()
    image = tl.program_id(1).to(tl.int64) * batch + tl.program_id(0)
    source = images + tl.load(index + image) * (H * W * CHANNELS)
    down, right = tl.load(dy + image).to(tl.int32), tl.load(dx + image).to(tl.int32)
    mirrored = tl.load(flip + image) != 0
    at = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = at < H * W * CHANNELS
    channel, place = at % CHANNELS, at // CHANNELS
    h, w = place // W + down, place % W + right
    valid = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    w = tl.where(mirrored, W - 1 - w, w)
    value = tl.load(source + (h * W + w) * CHANNELS + channel, mask=valid, other=0).to(tl.float32)
    centre = tl.load(mean + channel, mask=inside, other=0.0)
    spread = tl.load(std + channel, mask=inside, other=1.0)
    # Rounded as the plain division is: the batch is the same to the bit on every device.
    value = tl.div_rn(tl.div_rn(value, tl.full([TILE], 255.0, tl.float32)) - centre, spread)
    value = tl.where(valid, value, 0.0).to(out.dtype.element_ty)
    tl.store(out + image * (H * W * CHANNELS) + at, value, mask=inside)


def gather(
    images: Tensor, index: Tensor, flip: Tensor, dy: Tensor, dx: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype
) -> Tensor:
    """Batches [C, B, H, W, ch] out of ``images`` uint8 [n, H, W, ch]: flipped, shifted, normalised, zero outside."""
    _, rows, columns, channels = images.shape
    out = torch.empty(*index.shape, rows, columns, channels, dtype=dtype, device=images.device)
    index, flip, dy, dx = (t.contiguous() for t in (index, flip, dy, dx))
    _gather[(index.shape[1], index.shape[0], triton.cdiv(rows * columns * channels, TILE // 2))](
        images, index, flip, dy, dx, mean, std, out, index.shape[1], rows, columns, channels, TILE // 2
    )
    return out
