"""The activation of a sum whose second part is a product of low rank, which is computed on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from .channel_kernels import activated, slope_of
from .triton_support import await_inputs, check, jit, power, tl, triton

LANES, WARPS = 128, 8


@jit
def _product(
    left, right, row, channel, length, RANK: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    RIGHT_ROW: tl.constexpr, RIGHT_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Rows of ``left`` [length, RANK] times channels of ``right`` [RANK, WIDTH], in float32."""
    k = tl.arange(0, INNER)
    known = (row[:, None] < length) & (k[None, :] < RANK)
    a = tl.load(left + row[:, None] * RANK + k[None, :], mask=known, other=0.0)
    known = (k[:, None] < RANK) & (channel[None, :] < WIDTH)
    b = tl.load(right + k[:, None] * RIGHT_ROW + channel[None, :] * RIGHT_CHANNEL, mask=known, other=0.0)
    return tl.dot(a, b, input_precision="ieee")


@jit
def _tile(length, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The program's rows and channels of its client, the places of its elements, and which of them there are."""
    blocks: tl.constexpr = (WIDTH + LANES - 1) // LANES
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) % blocks * LANES + tl.arange(0, LANES)
    at = tl.program_id(1).to(tl.int64) * length * WIDTH + row[:, None] * WIDTH + channel[None, :]
    return row, channel, at, (row[:, None] < length) & (channel[None, :] < WIDTH)


@jit
def _total(
    base, inner, b, row, channel, at, inside, length, b_stride, RANK: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """What the activation is of."""
    client = tl.program_id(1).to(tl.int64)
    left, right = inner + client * length * RANK, b + client * b_stride
    value = _product(left, right, row, channel, length, RANK, WIDTH, INNER, 1, RANK)
    return value + tl.load(base + at, mask=inside, other=0.0).to(tl.float32)


@jit(do_not_specialize=["length"])
def _low_rank_activation(
    base, inner, b, out, length, b_stride, NAME: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    row, channel, at, inside = _tile(length, WIDTH, ROWS, LANES)
    value = _total(base, inner, b, row, channel, at, inside, length, b_stride, RANK, WIDTH, INNER)
    tl.store(out + at, activated(value, NAME).to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["length"])
def _low_rank_activation_backward(
    dout, dinner, a, base, inner, b, dbase, length, a_stride, b_stride, NAME: tl.constexpr, NEXT_RANK: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, NEXT_INNER: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    row, channel, at, inside = _tile(length, WIDTH, ROWS, LANES)
    value = _total(base, inner, b, row, channel, at, inside, length, b_stride, RANK, WIDTH, INNER)
    client = tl.program_id(1).to(tl.int64)
    left, right = dinner + client * length * NEXT_RANK, a + client * a_stride
    gradient = _product(left, right, row, channel, length, NEXT_RANK, WIDTH, NEXT_INNER, WIDTH, 1)
    gradient += tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dbase + at, (gradient * slope_of(value, NAME)).to(dbase.dtype.element_ty), mask=inside)


def _cut(base: Tensor) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """The programs of [C, rows, channels], the rows of a client, and the size of a tile."""
    check("activations of adapted layers", base)
    count, length, width = base.shape
    rows = 128 // base.element_size()  # products in float32 take more registers
    return (triton.cdiv(length, rows) * triton.cdiv(width, LANES), count), length, (rows, LANES)


def _inner(rank: int) -> int:
    """Products on tensor cores add up at least 16 terms."""
    return max(power(rank), 16)


def low_rank_activation(base: Tensor, inner: Tensor, b: Tensor, name: str) -> Tensor:
    """The activation ``name`` of base [C, rows, channels] plus inner [C, rows, r] times b [C, channels, r]."""
    (grid, length, size), out = _cut(base), torch.empty_like(base)
    width, rank = b.shape[1:]
    assert inner.is_contiguous()
    assert b[0].is_contiguous()
    tile = (rank, width, _inner(rank), *size)
    _low_rank_activation[grid](base, inner, b, out, length, b.stride(0), name, *tile, num_warps=WARPS)
    return out


def low_rank_activation_backward(
    dout: Tensor, dinner: Tensor, a: Tensor, base: Tensor, inner: Tensor, b: Tensor, name: str
) -> Tensor:
    """The gradient of base; that of the activations is ``dout`` plus dinner [C, rows, s] times a [C, s, channels]."""
    (grid, length, size), dbase = _cut(base), torch.empty_like(base)
    (width, rank), other = b.shape[1:], a.shape[1]
    assert dout.is_contiguous()
    assert dinner.is_contiguous()
    assert a[0].is_contiguous()
    tile = (other, rank, width, _inner(other), _inner(rank), *size)
    strides = (a.stride(0), b.stride(0))
    _low_rank_activation_backward[grid](
        dout, dinner, a, base, inner, b, dbase, length, *strides, name, *tile, num_warps=WARPS
    )
    return dbase
