"""GroupNorm with the residual and the ReLU or ReLU6 that follow it: forward in one launch, backward in two."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .channel_kernels import activated
from .side_stream import SideStream
from .triton_support import TILE, await_inputs, check, jit, power, tl, triton

IN_REGISTERS = 16384  # elements of a group that stay there between its statistics and its output
ROW_TILES = 8  # of LayerNorm's rows that a program takes
SUMMANDS = 64  # partial sums added at a time


@jit
def _group_sum(value):
    return tl.sum(tl.sum(value, 2, keep_dims=True), 1, keep_dims=True)


@jit
def _normalise(value, mean, rstd, gamma, beta, residual, out, at, mask, ACTIVATION: tl.constexpr):
    value = (value - mean) * rstd * gamma + beta
    if residual is not None:
        value += tl.load(residual + at, mask=mask, other=0.0)
    if ACTIVATION != "":
        value = activated(value, ACTIVATION)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["images"])
def _group_norm(
    x, gamma, beta, residual, out, mean, rstd, images, stride, eps, SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr, ACTIVATION: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client, group = tl.program_id(1).to(tl.int64), tl.program_id(0) % GROUPS
    first = tl.program_id(0) // GROUPS * IMAGES
    COUNT: tl.constexpr = SIZE * (CHANNELS // GROUPS)
    image = tl.arange(0, IMAGES)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    known = (first + image < images) & (lane < CHANNELS // GROUPS)
    start = (client * images + first) * (SIZE * CHANNELS) + group * (CHANNELS // GROUPS)
    at = (image * SIZE + row) * CHANNELS + lane
    channel = client * stride + group * (CHANNELS // GROUPS) + lane
    scale = tl.load(gamma + channel, mask=lane < CHANNELS // GROUPS, other=0.0).to(tl.float32)
    shift = tl.load(beta + channel, mask=lane < CHANNELS // GROUPS, other=0.0).to(tl.float32)
    x += start
    out += start
    if residual is not None:
        residual += start
    if ROWS >= SIZE:
        mask = known & (row < SIZE)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        average = _group_sum(value) / COUNT
        centred = tl.where(mask, value - average, 0.0)
        inverse = tl.rsqrt(_group_sum(centred * centred) / COUNT + eps)
        _normalise(value, average, inverse, scale, shift, residual, out, at, mask, ACTIVATION)
    else:
        average = tl.zeros([IMAGES, 1, 1], tl.float32)
        squares = tl.zeros([IMAGES, 1, 1], tl.float32)
        for begin in range(0, SIZE, ROWS):
            mask = known & (row < SIZE - begin)
            value = tl.load(x + at + begin * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            seen = begin * (CHANNELS // GROUPS)
            size = tl.minimum(ROWS, SIZE - begin) * (CHANNELS // GROUPS)
            local = _group_sum(value) / size
            centred = tl.where(mask, value - local, 0.0)
            ahead = local - average
            share = size.to(tl.float32) / (seen + size)
            squares += _group_sum(centred * centred) + ahead * ahead * (seen * share)
            average += ahead * share
        inverse = tl.rsqrt(squares / COUNT + eps)
        for begin in range(0, SIZE, ROWS):
            mask = known & (row < SIZE - begin)
            value = tl.load(x + at + begin * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            _normalise(value, average, inverse, scale, shift, residual, out, at + begin * CHANNELS, mask, ACTIVATION)
    statistic = (client * images + first + image) * GROUPS + group
    tl.store(mean + statistic, average, mask=first + image < images)
    tl.store(rstd + statistic, inverse, mask=first + image < images)


def _group_tile(size: int, lanes: int, elements: int, of_a_warp: int) -> tuple[int, int, int, int]:
    """Images, rows of their maps and channels in a program's tile of about ``elements``, and its warps."""
    lanes, rows = power(lanes), power(size)
    images = max(elements // (rows * lanes), 1)
    if rows * lanes > IN_REGISTERS:
        images, rows = 1, max(IN_REGISTERS // 4 // lanes, 1)
    return images, rows, lanes, min(max(images * rows * lanes // of_a_warp, 1), 16)


def alike(gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Both [C, channels] with the same distance of clients, which one that a layer does not have would lack."""
    same = len(gamma) == 1 or gamma.stride(0) == beta.stride(0)
    return (gamma, beta) if same else (gamma.contiguous(), beta.contiguous())


def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, residual: Tensor | None, activation: str, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    count, n, *size, channels = x.shape
    x = x.contiguous()
    out = torch.empty_like(x)
    gamma, beta = alike(gamma, beta)
    check("group norm", x)
    mean = torch.empty(count, n, 1, groups, 1, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    images, rows, lanes, warps = _group_tile(prod(size), channels // groups, TILE, 1024)
    _group_norm[(triton.cdiv(n, images) * groups, count)](
        x, gamma, beta, None if residual is None else residual.contiguous(), out, mean, rstd, n, gamma.stride(0), eps,
        prod(size), channels, groups, activation, images, rows, lanes, num_warps=warps,
    )  # fmt: skip
    return out, mean, rstd


@jit
def _cotangent(dout, dmore, x, out, mean, rstd, at, mask, ACTIVATION: tl.constexpr):
    dy = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
    if dmore is not None:
        dy += tl.load(dmore + at, mask=mask, other=0.0).to(tl.float32)
    if out is not None:
        after = tl.load(out + at, mask=mask, other=0.0)
        if ACTIVATION == "relu6":
            dy = tl.where((after > 0) & (after < 6), dy, 0.0)
        else:
            dy = tl.where(after > 0, dy, 0.0)
    normal = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
    return dy, normal


@jit
def _gradient(dy, normal, scale, rstd, a, b, dx, dresidual, at, mask):
    tl.store(dx + at, (rstd * (dy * scale - a - normal * b)).to(dx.dtype.element_ty), mask=mask)
    if dresidual is not None:
        tl.store(dresidual + at, dy.to(dresidual.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["images"])
def _group_norm_backward(
    dout, dmore, x, gamma, mean, rstd, out, dx, dresidual, partial, images, stride, SIZE: tl.constexpr,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, ACTIVATION: tl.constexpr, IMAGES: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client, group = tl.program_id(1).to(tl.int64), tl.program_id(0) % GROUPS
    block = tl.program_id(0) // GROUPS
    first = block * IMAGES
    COUNT: tl.constexpr = SIZE * (CHANNELS // GROUPS)
    image = tl.arange(0, IMAGES)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    known = (first + image < images) & (lane < CHANNELS // GROUPS)
    start = (client * images + first) * (SIZE * CHANNELS) + group * (CHANNELS // GROUPS)
    at = (image * SIZE + row) * CHANNELS + lane
    channel = client * stride + group * (CHANNELS // GROUPS) + lane
    scale = tl.load(gamma + channel, mask=lane < CHANNELS // GROUPS, other=0.0).to(tl.float32)
    statistic = (client * images + first + image) * GROUPS + group
    average = tl.load(mean + statistic, mask=first + image < images, other=0.0)
    inverse = tl.load(rstd + statistic, mask=first + image < images, other=0.0)
    dout += start
    if dmore is not None:
        dmore += start
    x += start
    dx += start
    if out is not None:
        out += start
    if dresidual is not None:
        dresidual += start
    if ROWS >= SIZE:
        mask = known & (row < SIZE)
        dy, normal = _cotangent(dout, dmore, x, out, average, inverse, at, mask, ACTIVATION)
        a = _group_sum(dy * scale) / COUNT
        b = _group_sum(dy * scale * normal) / COUNT
        _gradient(dy, normal, scale, inverse, a, b, dx, dresidual, at, mask)
        dgamma = tl.sum(tl.sum(dy * normal, 1, keep_dims=True), 0, keep_dims=True)
        dbeta = tl.sum(tl.sum(dy, 1, keep_dims=True), 0, keep_dims=True)
    else:
        dgamma = tl.zeros([1, 1, LANES], tl.float32)
        dbeta = tl.zeros([1, 1, LANES], tl.float32)
        for begin in range(0, SIZE, ROWS):
            mask = known & (row < SIZE - begin)
            dy, normal = _cotangent(dout, dmore, x, out, average, inverse, at + begin * CHANNELS, mask, ACTIVATION)
            dgamma += tl.sum(dy * normal, 1, keep_dims=True)
            dbeta += tl.sum(dy, 1, keep_dims=True)
        a = tl.sum(dbeta * scale, 2, keep_dims=True) / COUNT
        b = tl.sum(dgamma * scale, 2, keep_dims=True) / COUNT
        for begin in range(0, SIZE, ROWS):
            mask = known & (row < SIZE - begin)
            dy, normal = _cotangent(dout, dmore, x, out, average, inverse, at + begin * CHANNELS, mask, ACTIVATION)
            _gradient(dy, normal, scale, inverse, a, b, dx, dresidual, at + begin * CHANNELS, mask)
    blocks = (images + IMAGES - 1) // IMAGES
    partial += (client * blocks + block) * (2 * CHANNELS) + group * (CHANNELS // GROUPS)
    tl.store(partial + lane, dgamma, mask=lane < CHANNELS // GROUPS)
    tl.store(partial + CHANNELS + lane, dbeta, mask=lane < CHANNELS // GROUPS)


@jit(do_not_specialize=["images"])
def _row_norm_backward(
    dout, dtotal, x, gamma, mean, rstd, dx, partial, images, stride, CHANNELS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """For images of one pixel and one group, the rows of LayerNorm: a program adds up the parameters' gradients over
    many of them, as sums over few would outweigh the activations."""
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    scale = tl.load(gamma + client * stride + lane, mask=lane < CHANNELS, other=0.0).to(tl.float32)
    dout += client * images * CHANNELS
    if dtotal is not None:
        dtotal += client * images * CHANNELS
    x += client * images * CHANNELS
    dx += client * images * CHANNELS
    mean += client * images
    rstd += client * images
    dgamma = tl.zeros([ROWS, LANES], tl.float32)
    dbeta = tl.zeros([ROWS, LANES], tl.float32)
    for tile in range(tl.program_id(0) * TILES, (tl.program_id(0) + 1) * TILES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        at, mask = row * CHANNELS + lane, (row < images) & (lane < CHANNELS)
        average = tl.load(mean + row, mask=row < images, other=0.0)
        inverse = tl.load(rstd + row, mask=row < images, other=0.0)
        dy, normal = _cotangent(dout, None, x, None, average, inverse, at, mask, "")
        a = tl.sum(dy * scale, 1, keep_dims=True) / CHANNELS
        b = tl.sum(dy * scale * normal, 1, keep_dims=True) / CHANNELS
        gradient = inverse * (dy * scale - a - normal * b)
        if dtotal is not None:
            gradient += tl.load(dtotal + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=mask)
        dgamma += dy * normal
        dbeta += dy
    partial += (client * tl.num_programs(0) + tl.program_id(0)) * (2 * CHANNELS)
    tl.store(partial + lane, tl.sum(dgamma, 0, keep_dims=True), mask=lane < CHANNELS)
    tl.store(partial + CHANNELS + lane, tl.sum(dbeta, 0, keep_dims=True), mask=lane < CHANNELS)


@jit(do_not_specialize=["blocks"])
def _add_partials(
    partial, gamma_grad, beta_grad, blocks, stride, channels, SUMMANDS: tl.constexpr, LANES: tl.constexpr
):
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    partial += client * blocks * (2 * channels)
    total = tl.zeros([LANES], tl.float32)
    for begin in range(0, blocks, SUMMANDS):
        block = begin + tl.arange(0, SUMMANDS)[:, None]
        mask = (block < blocks) & (lane < 2 * channels)[None, :]
        total += tl.sum(tl.load(partial + block * (2 * channels) + lane[None, :], mask=mask, other=0.0), 0)
    total = total.to(gamma_grad.dtype.element_ty)
    tl.store(gamma_grad + client * stride + lane, total, mask=lane < channels)
    tl.store(beta_grad + client * stride + lane - channels, total, mask=(lane >= channels) & (lane < 2 * channels))


def group_norm_backward(
    dout: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, out: Tensor | None, groups: int,
    activation: str, has_residual: bool, gamma_grad: Tensor | None, beta_grad: Tensor | None, side_stream: SideStream,
    dmore: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Where the result was used twice, the gradients are ``dout`` and ``dmore``."""
    count, n, *size, channels = x.shape
    x = x.contiguous()
    if dmore is not None and ((out is None and has_residual) or groups == prod(size) == 1):
        dout, dmore = dout + dmore, None
    if groups == prod(size) == 1 and not activation and power(channels) <= IN_REGISTERS // 4:
        dx = row_norm_backward(dout, None, x, gamma, mean, rstd, gamma_grad, beta_grad, side_stream)
        return dx, dout if has_residual else None
    dx = torch.empty_like(x)
    # Without an activation the residual's gradient is the output's.
    dresidual = torch.empty_like(x) if has_residual and out is not None else None
    # Its many sums are within a warp where possible: twice as fast as across warps.
    images, rows, lanes, warps = _group_tile(prod(size), channels // groups, TILE // 2, 2048)
    blocks = triton.cdiv(n, images)
    partial = torch.empty(count, blocks, 2, channels, dtype=torch.float32, device=x.device)
    _group_norm_backward[(blocks * groups, count)](
        dout, dmore, x, gamma, mean, rstd, out, dx, dresidual, partial, n, gamma.stride(0), prod(size), channels,
        groups, activation, images, rows, lanes, num_warps=warps,
    )  # fmt: skip
    _submit_parameters(partial, gamma_grad, beta_grad, side_stream)
    return dx, (dout if has_residual and out is None else dresidual)


def row_norm_backward(
    dout: Tensor, dtotal: Tensor | None, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor,
    gamma_grad: Tensor | None, beta_grad: Tensor | None, side_stream: SideStream,
) -> Tensor:  # fmt: skip
    """Of LayerNorm over the rows of x [C, ..., channels]; plus ``dtotal``, where x is used besides."""
    dout, dtotal, dx = dout.contiguous(), None if dtotal is None else dtotal.contiguous(), torch.empty_like(x)
    check("rows of a norm", x)
    count, channels = len(x), x.shape[-1]
    lanes, n = power(channels), x[0].numel() // channels
    rows = max(TILE // lanes, 1)
    blocks = triton.cdiv(n, rows * ROW_TILES)
    partial = torch.empty(count, blocks, 2, channels, dtype=torch.float32, device=x.device)
    _row_norm_backward[(blocks, count)](
        dout, dtotal, x, gamma, mean, rstd, dx, partial, n, gamma.stride(0), channels, ROW_TILES, rows, lanes,
        num_warps=max(lanes // 512, 4),
    )  # fmt: skip
    _submit_parameters(partial, gamma_grad, beta_grad, side_stream)
    return dx


def _submit_parameters(
    partial: Tensor, gamma_grad: Tensor | None, beta_grad: Tensor | None, side_stream: SideStream
) -> None:
    if gamma_grad is not None or beta_grad is not None:
        side_stream.submit(lambda: _of_parameters(partial, gamma_grad, beta_grad), partial)


def _of_parameters(partial: Tensor, gamma_grad: Tensor | None, beta_grad: Tensor | None) -> None:
    """Add up the programs' sums; one of the two may be frozen."""
    count, blocks, _, channels = partial.shape
    both = gamma_grad is not None and beta_grad is not None
    targets: Any = (gamma_grad, beta_grad) if both else tuple(partial.new_empty(2, count, channels))
    lanes = min(power(2 * channels), 32)
    _add_partials[(triton.cdiv(2 * channels, lanes), count)](
        partial, *targets, blocks, targets[0].stride(0), channels, SUMMANDS, lanes
    )
    for given, total in zip((gamma_grad, beta_grad), targets, strict=True):
        if given is not None and given is not total:
            given.copy_(total)
