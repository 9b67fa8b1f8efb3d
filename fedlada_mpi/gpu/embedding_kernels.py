"""The gradient of a table of which rows were taken, often the same ones: sums in the order of a stable sort.

torch's own kernel adds up the parts of a long sum in no fixed order. Here the places of a row, one after another once
they are sorted, are cut into pieces, and the sums of the pieces are added up in a second launch. All sizes are those of
the arguments, so that a graph can capture it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_support import await_inputs, check, jit, power, tl, triton

PIECE = 32  # places that a program adds up


@jit
def _write_row(out, row, total, count, lane, WIDTH: tl.constexpr, BY_FREQUENCY: tl.constexpr):
    if BY_FREQUENCY:
        total = total / count.to(tl.float32)
    tl.store(out + row.to(tl.int64) * WIDTH + lane, total.to(out.dtype.element_ty), mask=lane < WIDTH)


@jit
def _piece_sums(
    dout, order, places, starts, ends, partial, out, WIDTH: tl.constexpr, BY_FREQUENCY: tl.constexpr,
    PIECE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A program for every place: of the first one of a piece, its sum."""
    await_inputs()
    first = tl.program_id(0)
    start, end = tl.load(starts + first), tl.load(ends + first)
    if (first - start) % PIECE == 0:
        lane = tl.program_id(1) * LANES + tl.arange(0, LANES)[None, :]
        at = first + tl.arange(0, PIECE)[:, None]
        source = tl.load(order + at, mask=at < end, other=0)
        value = tl.load(dout + source * WIDTH + lane, mask=(at < end) & (lane < WIDTH), other=0.0)
        total = tl.sum(value.to(tl.float32), 0, keep_dims=True)
        if end - start <= PIECE:
            _write_row(out, tl.load(places + first), total, end - start, lane, WIDTH, BY_FREQUENCY)
        else:
            # Two pieces of long sums begin at most within PIECE places: the last of one, and the first of another.
            slot = (2 * (first // PIECE) + (first == start).to(tl.int32)).to(tl.int64)
            tl.store(partial + slot * WIDTH + lane, total, mask=lane < WIDTH)


@jit(do_not_specialize=["length"])
def _long_sums(
    places, starts, ends, partial, out, length, WIDTH: tl.constexpr, BY_FREQUENCY: tl.constexpr, PIECE: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """A program for every PIECE places, in which at most one long sum begins: its pieces together."""
    await_inputs()
    near = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    start = tl.load(starts + near, mask=near < length, other=-1)
    size = tl.load(ends + near, mask=near < length, other=0) - start
    first = tl.max(tl.where((start == near) & (size > PIECE), near, -1), 0)
    if first >= 0:
        lane = tl.program_id(1) * LANES + tl.arange(0, LANES)[None, :]
        count = tl.load(ends + first) - first
        pieces = (count + PIECE - 1) // PIECE
        total = tl.zeros([PIECE, LANES], tl.float32)
        for begin in range(0, pieces, PIECE):
            piece = begin + tl.arange(0, PIECE)[:, None]
            slot = (2 * (first // PIECE + piece) + (piece == 0).to(tl.int32)).to(tl.int64)
            total += tl.load(partial + slot * WIDTH + lane, mask=(piece < pieces) & (lane < WIDTH), other=0.0)
        total = tl.sum(total, 0, keep_dims=True)
        _write_row(out, tl.load(places + first), total, count, lane, WIDTH, BY_FREQUENCY)


def embedding_gradient(dout: Tensor, places: Tensor, rows: int, by_frequency: bool) -> Tensor:
    """[rows, width]: for every row the sum of dout [n, width] at its places [n], or its mean."""
    dout = dout.contiguous()
    (length, width), out = dout.shape, dout.new_zeros(rows, dout.shape[1])
    if not length:
        return out
    check("embedding", dout.unsqueeze(0))
    narrow = next(kind for kind in (torch.int16, torch.int32, torch.int64) if rows <= torch.iinfo(kind).max)
    places, order = torch.sort(places.to(narrow), stable=True)  # whose time is that of its bytes
    starts, ends = (torch.searchsorted(places, places, out_int32=True, right=right) for right in (False, True))
    pieces, lanes = triton.cdiv(length, PIECE), min(power(width), 128)
    partial = torch.empty(2 * pieces, width, dtype=torch.float32, device=dout.device)
    blocks, constants = triton.cdiv(width, lanes), (width, by_frequency, PIECE, lanes)
    warps = min(max(PIECE * lanes // 1024, 1), 4)
    _piece_sums[(length, blocks)](dout, order, places, starts, ends, partial, out, *constants, num_warps=warps)
    _long_sums[(pieces, blocks)](places, starts, ends, partial, out, length, *constants, num_warps=warps)
    return out
