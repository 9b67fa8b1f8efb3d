"""Products of low rank alone, and the activation of a sum whose second part is one, which is computed on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from .channel_kernels import activated, slope_of
from .triton_support import await_inputs, check, jit, power, tl, triton

# Rows, of two bytes an element, and channels of a tile; its warps; tiles of a program, one below the other; how many of
# them are loaded ahead, by 1 none.
FORWARD, BACKWARD, PRODUCT = (64, 64, 4, 1, 1), (64, 64, 8, 4, 3), (64, 128, 8, 1, 1)
# Rows and channels of a tile of gradients, its warps, and how many are loaded ahead.
GRADIENTS = (128, 64, 8, 3)
PROGRAMS = 256  # that fill a GPU
MOST_RANK = 16  # up to which a product on tensor cores has it in one piece


@jit
def _left(left, row, length, RANK: tl.constexpr, INNER: tl.constexpr):
    """Rows of [length, RANK]."""
    k = tl.arange(0, INNER)
    known = (row[:, None] < length) & (k[None, :] < RANK)
    return tl.load(left + row[:, None] * RANK + k[None, :], mask=known, other=0.0)


@jit
def _right(
    right, channel, RANK: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROW: tl.constexpr,
    CHANNEL: tl.constexpr,
):  # fmt: skip
    """Channels of [RANK, WIDTH]."""
    k = tl.arange(0, INNER)
    known = (k[:, None] < RANK) & (channel[None, :] < WIDTH)
    return tl.load(right + k[:, None] * ROW + channel[None, :] * CHANNEL, mask=known, other=0.0)


@jit
def _cut(WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr):
    """The program's client, its first row there, and its channels."""
    blocks: tl.constexpr = (WIDTH + LANES - 1) // LANES
    channel = tl.program_id(0) % blocks * LANES + tl.arange(0, LANES)
    return tl.program_id(1).to(tl.int64), tl.program_id(0) // blocks * (ROWS * TILES), channel


@jit
def _places(first, tile, channel, length, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The rows of a tile, the places of its elements in their client, and which of them there are."""
    row = first + tile * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + channel[None, :]
    return row, at, (row[:, None] < length) & (channel[None, :] < WIDTH)


@jit(do_not_specialize=["length"])
def _low_rank_product(
    inner, b, bias, out, length, b_stride, RANK: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client, first, channel = _cut(WIDTH, ROWS, LANES, TILES)
    out += client * length * WIDTH
    inner += client * length * RANK
    right = _right(b + client * b_stride, channel, RANK, WIDTH, INNER, 1, RANK)
    each = tl.zeros([LANES], tl.float32)
    if bias is not None:
        each = tl.load(bias + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row, at, inside = _places(first, tile, channel, length, WIDTH, ROWS)
        left = _left(inner, row, length, RANK, INNER)
        value = tl.dot(left, right, input_precision="ieee") + each[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["length"])
def _low_rank_activation(
    base, inner, b, out, length, b_stride, NAME: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client, first, channel = _cut(WIDTH, ROWS, LANES, TILES)
    base += client * length * WIDTH
    out += client * length * WIDTH
    inner += client * length * RANK
    right = _right(b + client * b_stride, channel, RANK, WIDTH, INNER, 1, RANK)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row, at, inside = _places(first, tile, channel, length, WIDTH, ROWS)
        # All loads before the first product, which waits for its own: so the others are on their way meanwhile.
        value = tl.load(base + at, mask=inside, other=0.0)
        left = _left(inner, row, length, RANK, INNER)
        value = tl.dot(left, right, value.to(tl.float32), input_precision="ieee")
        tl.store(out + at, activated(value, NAME).to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["length"])
def _low_rank_activation_backward(
    dout, dinner, a, base, inner, b, dbase, length, a_stride, b_stride, NAME: tl.constexpr, NEXT_RANK: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, NEXT_INNER: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client, first, channel = _cut(WIDTH, ROWS, LANES, TILES)
    base += client * length * WIDTH
    dout += client * length * WIDTH
    dbase += client * length * WIDTH
    inner += client * length * RANK
    dinner += client * length * NEXT_RANK
    right = _right(b + client * b_stride, channel, RANK, WIDTH, INNER, 1, RANK)
    next_right = _right(a + client * a_stride, channel, NEXT_RANK, WIDTH, NEXT_INNER, WIDTH, 1)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row, at, inside = _places(first, tile, channel, length, WIDTH, ROWS)
        value = tl.load(base + at, mask=inside, other=0.0)
        gradient = tl.load(dout + at, mask=inside, other=0.0)
        left = _left(inner, row, length, RANK, INNER)
        next_left = _left(dinner, row, length, NEXT_RANK, NEXT_INNER)
        value = tl.dot(left, right, value.to(tl.float32), input_precision="ieee")
        gradient = tl.dot(next_left, next_right, gradient.to(tl.float32), input_precision="ieee")
        tl.store(dbase + at, (gradient * slope_of(value, NAME)).to(dbase.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["length"])
def _low_rank_gradients(
    dout, inner, b, dinner, partial, length, b_stride, scale, RANK: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    row, k = block * ROWS + tl.arange(0, ROWS), tl.arange(0, INNER)
    dout += client * length * WIDTH
    b += client * b_stride
    partial += (client * tl.num_programs(0) + block) * (WIDTH * RANK)
    right = _left(inner + client * length * RANK, row, length, RANK, INNER)
    total = tl.zeros([ROWS, INNER], tl.float32)
    for begin in tl.range(0, WIDTH, LANES, num_stages=STAGES):
        channel = begin + tl.arange(0, LANES)
        inside = (row[:, None] < length) & (channel[None, :] < WIDTH)
        value = tl.load(dout + row[:, None] * WIDTH + channel[None, :], mask=inside, other=0.0)
        total = tl.dot(value, _left(b, channel, WIDTH, RANK, INNER), total, input_precision="ieee")
        product = tl.dot(tl.trans(value), right, input_precision="ieee")
        known = (channel[:, None] < WIDTH) & (k[None, :] < RANK)
        tl.store(partial + channel[:, None] * RANK + k[None, :], product, mask=known)
    known = (row[:, None] < length) & (k[None, :] < RANK)
    at = client * length * RANK + row[:, None] * RANK + k[None, :]
    tl.store(dinner + at, (total * scale).to(dinner.dtype.element_ty), mask=known)


def _programs(base: Tensor, sizes: tuple[int, int, int, int, int]) -> tuple[tuple[int, int], int, tuple[int, ...]]:
    """Those of [C, rows, channels], the rows of a client, and the constants of tiles."""
    check("activations of adapted layers", base)
    (count, length, width), (rows, lanes, _, tiles, stages) = base.shape, sizes
    rows = max(rows * 2 // base.element_size(), 16)  # products in float32 take more registers
    grid = (triton.cdiv(length, rows * tiles) * triton.cdiv(width, lanes), count)
    return grid, length, (rows, lanes, tiles, stages)


def _inner(rank: int) -> int:
    """Products on tensor cores add up at least 16 terms."""
    return max(power(rank), 16)


def low_rank_product(inner: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """inner [C, rows, r] times b [C, channels, r], plus bias [channels]."""
    width, rank = b.shape[1:]
    out = inner.new_empty(*inner.shape[:2], width)
    grid, length, size = _programs(out, PRODUCT)
    assert inner.is_contiguous()
    assert b[0].is_contiguous()
    tile = (rank, width, _inner(rank), *size)
    _low_rank_product[grid](inner, b, bias, out, length, b.stride(0), *tile, num_warps=PRODUCT[2])
    return out


def low_rank_activation(base: Tensor, inner: Tensor, b: Tensor, name: str) -> Tensor:
    """The activation ``name`` of base [C, rows, channels] plus inner [C, rows, r] times b [C, channels, r]."""
    (grid, length, size), out = _programs(base, FORWARD), torch.empty_like(base)
    width, rank = b.shape[1:]
    assert inner.is_contiguous()
    assert b[0].is_contiguous()
    tile = (rank, width, _inner(rank), *size)
    _low_rank_activation[grid](base, inner, b, out, length, b.stride(0), name, *tile, num_warps=FORWARD[2])
    return out


def low_rank_activation_backward(
    dout: Tensor, dinner: Tensor, a: Tensor, base: Tensor, inner: Tensor, b: Tensor, name: str
) -> Tensor:
    """The gradient of base; that of the activations is ``dout`` plus dinner [C, rows, s] times a [C, s, channels]."""
    (grid, length, size), dbase = _programs(base, BACKWARD), torch.empty_like(base)
    (width, rank), other = b.shape[1:], a.shape[1]
    assert dout.is_contiguous()
    assert dinner.is_contiguous()
    assert a[0].is_contiguous()
    tile = (other, rank, width, _inner(other), _inner(rank), *size)
    strides = (a.stride(0), b.stride(0))
    _low_rank_activation_backward[grid](
        dout, dinner, a, base, inner, b, dbase, length, *strides, name, *tile, num_warps=BACKWARD[2]
    )
    return dbase


def takes_gradients(dout: Tensor, rank: int) -> bool:
    """Whether ``low_rank_gradients`` gains: in float32, or where a GPU is not full, two products are faster, and its
    parts grow with the rank."""
    count, length, _ = dout.shape
    full = count * triton.cdiv(length, GRADIENTS[0]) >= PROGRAMS
    return full and dout.element_size() == 2 and rank <= MOST_RANK


def low_rank_gradients(dout: Tensor, inner: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """In one pass over dout [C, rows, channels]: its product with b [C, channels, r], times ``scale``, and that of its
    transpose with inner [C, rows, r], in parts [C, programs, channels, r]."""
    check("gradients of adapted layers", dout)
    (count, length, width), rank, (rows, lanes, warps, stages) = dout.shape, b.shape[2], GRADIENTS
    rows = max(rows * 2 // dout.element_size(), 16)
    blocks = triton.cdiv(length, rows)
    dinner = torch.empty_like(inner)
    partial = torch.empty(count, blocks, width, rank, dtype=torch.float32, device=dout.device)
    assert dout.is_contiguous()
    assert inner.is_contiguous()
    assert b[0].is_contiguous()
    tile = (rank, width, _inner(rank), rows, lanes, stages)
    _low_rank_gradients[(blocks, count)](
        dout, inner, b, dinner, partial, length, b.stride(0), scale, *tile, num_warps=warps
    )
    return dinner, partial
