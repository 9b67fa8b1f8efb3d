"""GroupNorm with the residual and the ReLU or ReLU6 that follow it: forward in one launch, backward in two.

Where a convolution that keeps the size of its map follows, the same launches write its columns and add up the gradients
of these: ``im2col`` and ``col2im`` would take a launch each, and read and write the map once more.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from .channel_kernels import activated
from .norm_sum_kernels import submit_sums
from .side_stream import SideStream
from .triton_support import TILE, Window, await_inputs, check, jit, live_taps, power, tl, triton

IN_REGISTERS = 16384  # elements of a group that stay there between its statistics and its output
ROW_TILES = 8  # of LayerNorm's rows that a program takes
SECTOR = 32  # bytes that a GPU reads and writes at once
SHARED = 128  # bytes of a pixel from which on parts of sectors that two programs read no longer matter
LARGE = 16  # pixels of a map; of smaller ones, launches take longer than memory
TOGETHER = 4096  # elements of several groups in a program
MOST_TAPS = 25  # as each has code of its own
BUSY, SMALLEST = 1024, 2048  # warps that keep a GPU busy; fewer programs have more each, of at least so many bytes


@jit
def _of_own_group(value, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """For each channel of [images, channels] the sum over its group, [images, 1, channels]."""
    channel = tl.arange(0, value.shape[1])[None, :, None]
    belongs = channel // WIDTH == tl.arange(0, AT_ONCE)[None, None, :]
    total = tl.sum(tl.where(belongs, value[:, :, None], 0.0), 1)
    return tl.sum(tl.where(belongs, total[:, None, :], 0.0), 2)[:, None, :]


@jit
def _group_sum(value, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """Over the pixels and channels of each group of [images, pixels, channels]."""
    if AT_ONCE == 1:
        total = tl.sum(tl.sum(value, 2, keep_dims=True), 1, keep_dims=True)
    else:
        total = _of_own_group(tl.sum(value, 1), WIDTH, AT_ONCE)
    return total


@jit
def _cut(
    image, lane, images, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr, IMAGES: tl.constexpr
):
    """The program's client, first group and image; of its tile the places of statistics, and which of them there are.

    A group alone has one statistic for an image; of several, each channel has that of its group.
    """
    client, group = tl.program_id(1).to(tl.int64), tl.program_id(0) % (GROUPS // AT_ONCE) * AT_ONCE
    first = tl.program_id(0) // (GROUPS // AT_ONCE) * IMAGES
    statistic, known = (client * images + first + image) * GROUPS + group, first + image < images
    if AT_ONCE > 1:
        statistic += lane // (CHANNELS // GROUPS)
        known &= lane < CHANNELS // GROUPS * AT_ONCE
    return client, group, first, statistic, known


@jit
def _normalise(value, mean, rstd, gamma, beta, residual, out, at, mask, ACTIVATION: tl.constexpr):
    value = (value - mean) * rstd * gamma + beta
    if residual is not None:
        value += tl.load(residual + at, mask=mask, other=0.0)
    if ACTIVATION != "":
        value = activated(value, ACTIVATION)
    value = value.to(out.dtype.element_ty)
    tl.store(out + at, value, mask=mask)
    return value


@jit
def _column_of(
    image, row, lane, tap, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, TOP: tl.constexpr,
    LEFT: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
):  # fmt: skip
    """Where the columns of a map of the same size have a pixel as seen through a tap, and whether any output sees it.

    Where none does, it is the place of an output that sees padding: all pixels together give every place.
    """
    h, w = row // W + (TOP - tap // TAPS_W), row % W + (LEFT - tap % TAPS_W)
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
    pixel = (h + H) % H * W + (w + W) % W
    return ((image * (H * W) + pixel) * (TAPS_H * TAPS_W) + tap) * CHANNELS + lane, inside


@jit(do_not_specialize=["images"])
def _group_norm(
    x, gamma, beta, residual, out, cols, mean, rstd, images, stride, eps, H: tl.constexpr, W: tl.constexpr,
    CHANNELS: tl.constexpr, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr, ACTIVATION: tl.constexpr,
    IMAGES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
):  # fmt: skip
    await_inputs()
    SIZE: tl.constexpr = H * W
    WIDTH: tl.constexpr = CHANNELS // GROUPS
    COUNT: tl.constexpr = SIZE * WIDTH
    image = tl.arange(0, IMAGES)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    client, group, first, statistic, measured = _cut(image, lane, images, CHANNELS, GROUPS, AT_ONCE, IMAGES)
    known = (first + image < images) & (lane < WIDTH * AT_ONCE)
    start = (client * images + first) * (SIZE * CHANNELS) + group * WIDTH
    at = (image * SIZE + row) * CHANNELS + lane
    channel = client * stride + group * WIDTH + lane
    scale = tl.load(gamma + channel, mask=lane < WIDTH * AT_ONCE, other=0.0).to(tl.float32)
    shift = tl.load(beta + channel, mask=lane < WIDTH * AT_ONCE, other=0.0).to(tl.float32)
    x += start
    out += start
    if residual is not None:
        residual += start
    if ROWS >= SIZE:
        mask = known & (row < SIZE)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        average = _group_sum(value, WIDTH, AT_ONCE) / COUNT
        centred = tl.where(mask, value - average, 0.0)
        inverse = tl.rsqrt(_group_sum(centred * centred, WIDTH, AT_ONCE) / COUNT + eps)
        value = _normalise(value, average, inverse, scale, shift, residual, out, at, mask, ACTIVATION)
        if cols is not None:
            cols += (client * images + first) * (SIZE * TAPS_H * TAPS_W * CHANNELS) + group * WIDTH
            for tap in tl.static_range(TAPS_H * TAPS_W):
                to, inside = _column_of(image, row, lane, tap, H, W, CHANNELS, TOP, LEFT, TAPS_H, TAPS_W)
                tl.store(cols + to, tl.where(inside, value, 0.0).to(value.dtype), mask=mask)
    else:
        tl.static_assert(AT_ONCE == 1)
        average = tl.zeros([IMAGES, 1, 1], tl.float32)
        squares = tl.zeros([IMAGES, 1, 1], tl.float32)
        for begin in range(0, SIZE, ROWS):
            mask = known & (row < SIZE - begin)
            value = tl.load(x + at + begin * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            seen = begin * WIDTH
            size = tl.minimum(ROWS, SIZE - begin) * WIDTH
            local = _group_sum(value, WIDTH, AT_ONCE) / size
            centred = tl.where(mask, value - local, 0.0)
            ahead = local - average
            share = size.to(tl.float32) / (seen + size)
            squares += _group_sum(centred * centred, WIDTH, AT_ONCE) + ahead * ahead * (seen * share)
            average += ahead * share
        inverse = tl.rsqrt(squares / COUNT + eps)
        for begin in range(0, SIZE, ROWS):
            mask = known & (row < SIZE - begin)
            value = tl.load(x + at + begin * CHANNELS, mask=mask, other=0.0).to(tl.float32)
            _normalise(value, average, inverse, scale, shift, residual, out, at + begin * CHANNELS, mask, ACTIVATION)
    if AT_ONCE > 1:
        measured &= lane % WIDTH == 0
    tl.store(mean + statistic, average, mask=measured)
    tl.store(rstd + statistic, inverse, mask=measured)


def _groups_at_once(size: int, width: int, groups: int, element_bytes: int) -> int:
    """Groups of a program: more than one where a pixel's channels of one are parts of sectors of memory, which several
    programs would have to read."""
    at_once = 1
    while size >= LARGE and width * element_bytes % SECTOR and width * element_bytes < SHARED:
        width, at_once = 2 * width, 2 * at_once
        if groups % at_once or power(size) * power(width) > TOGETHER:
            return at_once // 2
    return at_once


def _group_tile(size: int, lanes: int, elements: int) -> tuple[int, int, int]:
    """Images, rows of their maps and channels in a program's tile of about ``elements``."""
    lanes, rows = power(lanes), power(size)
    images = max(elements // (rows * lanes), 1)
    if rows * lanes > IN_REGISTERS:
        images, rows = 1, max(IN_REGISTERS // 4 // lanes, 1)
    return images, rows, lanes


def _warps(elements: int, of_a_warp: int, programs: int, element_bytes: int) -> int:
    """Of a program with so many elements: one for ``of_a_warp`` of them, more where programs are few."""
    more = min(elements * element_bytes // SMALLEST, 1 << (BUSY // programs).bit_length() >> 1)
    wanted = min(max(elements // of_a_warp, more, 1), 16)
    return 1 << wanted.bit_length() >> 1


def makes_columns(x: Tensor, groups: int, window: Window, width: int) -> bool:
    """Whether a norm of x can write a convolution's columns: of whole groups in registers, and without padding.

    Groups of few channels are left to ``im2col``, which writes whole pixels, and so are kernels of many taps.
    """
    *_, rows, columns, channels = x.shape
    *_, height, length = live_taps(window)
    in_registers = power(rows * columns) * power(channels // groups) <= IN_REGISTERS
    together = channels // groups * x.element_size() >= SECTOR
    return in_registers and together and height * length <= MOST_TAPS and width == height * length * channels


def alike(gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Both [C, channels] with the same distance of clients, which one that a layer does not have would lack."""
    same = len(gamma) == 1 or gamma.stride(0) == beta.stride(0)
    return (gamma, beta) if same else (gamma.contiguous(), beta.contiguous())


def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, residual: Tensor | None, activation: str, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    out, _, mean, rstd = norm_columns(x, gamma, beta, groups, residual, activation, eps, None)
    return out, mean, rstd


def norm_columns(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, residual: Tensor | None, activation: str, eps: float,
    window: Window | None,
) -> tuple[Tensor, Any, Tensor, Tensor]:  # fmt: skip
    """The map, its columns for a window that ``makes_columns`` takes, the means and the inverse deviations."""
    count, n, *size, channels = x.shape
    x = x.contiguous()
    out = torch.empty_like(x)
    gamma, beta = alike(gamma, beta)
    mean = torch.empty(count, n, 1, groups, 1, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    taps = (0, 0, 0, 0) if window is None else live_taps(window)
    cols = None if window is None else x.new_empty(count, n * prod(size), taps[2] * taps[3] * channels)
    check("group norm", *(t for t in (x, cols) if t is not None))
    at_once = _groups_at_once(prod(size), channels // groups, groups, x.element_size())
    width = channels // groups * at_once
    images, rows, lanes = _group_tile(prod(size), width, TILE)
    programs = (triton.cdiv(n, images) * (groups // at_once), count)
    _group_norm[programs](
        x, gamma, beta, None if residual is None else residual.contiguous(), out, cols, mean, rstd, n,
        gamma.stride(0), eps, *_rows_and_columns(size), channels, groups, at_once, activation, images, rows, lanes,
        *taps,
        num_warps=_warps(images * rows * width, 1024 if at_once == 1 else 2048, prod(programs), x.element_size()),
    )  # fmt: skip
    return out, cols, mean, rstd


def _rows_and_columns(size: list[int]) -> tuple[int, int]:
    return prod(size[:-1]), prod(size[-1:])


@jit
def _given(dout, dmore, at, mask):
    """The gradient of the result, by one or both of the layers that use it."""
    dy = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)
    if dmore is not None:
        dy += tl.load(dmore + at, mask=mask, other=0.0).to(tl.float32)
    return dy


@jit
def _cotangent(dy, x, out, mean, rstd, at, mask, ACTIVATION: tl.constexpr):
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
    dout, dmore, dcols, x, gamma, mean, rstd, out, dx, dresidual, partial, images, stride, H: tl.constexpr,
    W: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr, ACTIVATION: tl.constexpr,
    IMAGES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    TAPS_H: tl.constexpr, TAPS_W: tl.constexpr,
):  # fmt: skip
    await_inputs()
    SIZE: tl.constexpr = H * W
    WIDTH: tl.constexpr = CHANNELS // GROUPS
    COUNT: tl.constexpr = SIZE * WIDTH
    image = tl.arange(0, IMAGES)[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    client, group, first, statistic, measured = _cut(image, lane, images, CHANNELS, GROUPS, AT_ONCE, IMAGES)
    known = (first + image < images) & (lane < WIDTH * AT_ONCE)
    start = (client * images + first) * (SIZE * CHANNELS) + group * WIDTH
    at = (image * SIZE + row) * CHANNELS + lane
    channel = client * stride + group * WIDTH + lane
    scale = tl.load(gamma + channel, mask=lane < WIDTH * AT_ONCE, other=0.0).to(tl.float32)
    average = tl.load(mean + statistic, mask=measured, other=0.0)
    inverse = tl.load(rstd + statistic, mask=measured, other=0.0)
    if dout is not None:
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
        dy = tl.zeros([IMAGES, ROWS, LANES], tl.float32)
        if dout is not None:
            dy = _given(dout, dmore, at, mask)
        if dcols is not None:
            dcols += (client * images + first) * (SIZE * TAPS_H * TAPS_W * CHANNELS) + group * WIDTH
            for tap in tl.static_range(TAPS_H * TAPS_W):
                source, inside = _column_of(image, row, lane, tap, H, W, CHANNELS, TOP, LEFT, TAPS_H, TAPS_W)
                dy += tl.load(dcols + source, mask=mask & inside, other=0.0).to(tl.float32)
        dy, normal = _cotangent(dy, x, out, average, inverse, at, mask, ACTIVATION)
        if AT_ONCE == 1:
            a = _group_sum(dy * scale, WIDTH, AT_ONCE) / COUNT
            b = _group_sum(dy * scale * normal, WIDTH, AT_ONCE) / COUNT
            dgamma = tl.sum(tl.sum(dy * normal, 1, keep_dims=True), 0, keep_dims=True)
            dbeta = tl.sum(tl.sum(dy, 1, keep_dims=True), 0, keep_dims=True)
        else:  # the sums of channels serve both
            dgamma, dbeta = tl.sum(dy * normal, 1, keep_dims=True), tl.sum(dy, 1, keep_dims=True)
            a = _group_sum(dbeta * scale, WIDTH, AT_ONCE) / COUNT
            b = _group_sum(dgamma * scale, WIDTH, AT_ONCE) / COUNT
            dgamma, dbeta = tl.sum(dgamma, 0, keep_dims=True), tl.sum(dbeta, 0, keep_dims=True)
        _gradient(dy, normal, scale, inverse, a, b, dx, dresidual, at, mask)
    else:
        tl.static_assert(AT_ONCE == 1)
        dgamma = tl.zeros([1, 1, LANES], tl.float32)
        dbeta = tl.zeros([1, 1, LANES], tl.float32)
        for begin in range(0, SIZE, ROWS):
            mask = known & (row < SIZE - begin)
            dy = _given(dout, dmore, at + begin * CHANNELS, mask)
            dy, normal = _cotangent(dy, x, out, average, inverse, at + begin * CHANNELS, mask, ACTIVATION)
            dgamma += tl.sum(dy * normal, 1, keep_dims=True)
            dbeta += tl.sum(dy, 1, keep_dims=True)
        a = _group_sum(dbeta * scale, WIDTH, AT_ONCE) / COUNT
        b = _group_sum(dgamma * scale, WIDTH, AT_ONCE) / COUNT
        for begin in range(0, SIZE, ROWS):
            mask = known & (row < SIZE - begin)
            dy = _given(dout, dmore, at + begin * CHANNELS, mask)
            dy, normal = _cotangent(dy, x, out, average, inverse, at + begin * CHANNELS, mask, ACTIVATION)
            _gradient(dy, normal, scale, inverse, a, b, dx, dresidual, at + begin * CHANNELS, mask)
    blocks = (images + IMAGES - 1) // IMAGES
    partial += (client * blocks + first // IMAGES) * (2 * CHANNELS) + group * WIDTH
    tl.store(partial + lane, dgamma, mask=lane < WIDTH * AT_ONCE)
    tl.store(partial + CHANNELS + lane, dbeta, mask=lane < WIDTH * AT_ONCE)


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
        dy, normal = _cotangent(_given(dout, None, at, mask), x, None, average, inverse, at, mask, "")
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


def group_norm_backward(
    dout: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, out: Tensor | None, groups: int,
    activation: str, has_residual: bool, gamma_grad: Tensor | None, beta_grad: Tensor | None, side_stream: SideStream,
    dmore: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Where the result was used twice, the gradients are ``dout`` and ``dmore``."""
    _, _, *size, channels = x.shape
    x = x.contiguous()
    if dmore is not None and groups == prod(size) == 1:
        dout, dmore = dout + dmore, None
    if groups == prod(size) == 1 and not activation and power(channels) <= IN_REGISTERS // 4:
        dx = row_norm_backward(dout, None, x, gamma, mean, rstd, gamma_grad, beta_grad, side_stream)
        return dx, dout if has_residual else None
    # Without an activation the residual's gradient is the output's, where that is there as one.
    given = out is None and dmore is None
    dresidual = torch.empty_like(x) if has_residual and not given else None
    dx, partial = _gradients(dout, dmore, None, None, x, gamma, mean, rstd, out, groups, activation, dresidual)
    submit_sums(partial, gamma_grad, beta_grad, side_stream)
    return dx, (dout if has_residual and given else dresidual)


def norm_columns_backward(
    dout: Tensor | None, dcols: Tensor, window: Window, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor,
    out: Tensor | None, groups: int, activation: str, has_residual: bool, gamma_grad: Tensor | None,
    beta_grad: Tensor | None, side_stream: SideStream,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradients are those of the columns and, where the map is used besides, ``dout``."""
    x = x.contiguous()
    dresidual = torch.empty_like(x) if has_residual else None
    dx, partial = _gradients(dout, None, dcols, window, x, gamma, mean, rstd, out, groups, activation, dresidual)
    submit_sums(partial, gamma_grad, beta_grad, side_stream)
    return dx, dresidual


def _gradients(
    dout: Tensor | None, dmore: Tensor | None, dcols: Tensor | None, window: Window | None, x: Tensor, gamma: Tensor,
    mean: Tensor, rstd: Tensor, out: Tensor | None, groups: int, activation: str, dresidual: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x, and partial sums of those of the parameters."""
    count, n, *size, channels = x.shape
    dx = torch.empty_like(x)
    at_once = _groups_at_once(prod(size), channels // groups, groups, x.element_size())
    width = channels // groups * at_once
    images, rows, lanes = _group_tile(prod(size), width, TILE // 2)
    blocks, parts = triton.cdiv(n, images), groups // at_once
    # Its many sums are within a warp where possible: twice as fast as across warps.
    warps = _warps(images * rows * width, 2048, count * blocks * parts, x.element_size())
    partial = torch.empty(count, blocks, 2, channels, dtype=torch.float32, device=x.device)
    _group_norm_backward[(blocks * parts, count)](
        dout, dmore, dcols, x, gamma, mean, rstd, out, dx, dresidual, partial, n, gamma.stride(0),
        *_rows_and_columns(size), channels, groups, at_once, activation, images, rows, lanes,
        *((0, 0, 0, 0) if window is None else live_taps(window)), num_warps=warps,
    )  # fmt: skip
    return dx, partial


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
    submit_sums(partial, gamma_grad, beta_grad, side_stream)
    return dx
