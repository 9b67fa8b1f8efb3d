"""Products of small matrices, those of one model or of a few: of no more tiles than a GPU takes at once.

Such a product takes little longer than its launch, for which a library's kernel waits until the one before has ended;
ours have been launched by then. Where there are more tiles, or sums are in full float32, the library computes.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from .channel_kernels import spread
from .limits import MOST_ELEMENTS
from .products import library_product
from .triton_support import await_inputs, fetch, jit, launches_overlap, tl, triton

AT_ONCE = 132  # programs; the processors of an H100 and H200
MOST_SHARES = 16
LARGEST = 64 * 128 * 1152  # products of numbers in a program: with more of them, the library gains by larger tiles
LONG = 3000  # sums over the pixels of all images, of which a gradient has few and long ones
SIZES = ((64, 32), (64, 64), (64, 128), (128, 64), (128, 128))  # rows and columns of tiles, by what they cost
STAGES = 4  # tiles of operands under way


class Tiling(NamedTuple):
    """A tile's rows and columns, how much of a sum it takes at once, and how many programs share the sum."""

    rows: int
    columns: int
    depth: int
    shares: int = 1

    def tiles(self, m: int, n: int) -> int:
        """Of a result [m, n]."""
        cover: int = triton.cdiv(m, self.rows) * triton.cdiv(n, self.columns)
        return cover


@jit
def _part(matrix, row, column, rows, columns, TURNED: tl.constexpr):
    """Some rows and columns of a matrix [rows, columns], stored as [columns, rows] if turned; zero beyond its sides."""
    if TURNED:
        at = column[None, :] * rows + row[:, None]
    else:
        at = row[:, None] * columns + column[None, :]
    return tl.load(matrix + at, mask=(row[:, None] < rows) & (column[None, :] < columns), other=0.0)


@jit
def _fetch(matrix, elements):
    """Get this program's share of a matrix, as all of the client's programs need it, into the GPU's cache."""
    LINE: tl.constexpr = 32  # numbers
    share = tl.cdiv(tl.cdiv(elements, LINE), tl.num_programs(0))
    first = tl.program_id(0) * share
    for begin in range(first, first + share, 128):
        fetch(matrix + tl.minimum(tl.minimum(begin + tl.arange(0, 128), first + share) * LINE, elements - 1))


@jit
def _store_share(
    total, at, mask, partial, arrived, number, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHARES: tl.constexpr
):  # fmt: skip
    """Store tile ``number``, or the sum of its shares."""
    if SHARES > 1:
        own = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        partial += number * (SHARES * ROWS * COLUMNS)
        tl.store(partial + share * (ROWS * COLUMNS) + own, total)
        tl.debug_barrier()  # the whole share, before it counts as there
        if tl.atomic_add(arrived + number, 1, sem="acq_rel") == SHARES - 1:
            # Whichever program is the last adds up all shares in the same order.
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for other in tl.static_range(SHARES):
                total += tl.load(partial + other * (ROWS * COLUMNS) + own, cache_modifier=".cg")
            tl.store(at, total.to(at.dtype.element_ty), mask=mask)
            tl.store(arrived + number, 0)
    else:
        tl.store(at, total.to(at.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["m", "n", "length"])
def _product(
    a, b, bias, out, partial, arrived, m, n, length, a_stride, b_stride, bias_stride, out_stride, M_UNIT: tl.constexpr,
    N_UNIT: tl.constexpr, UNIT: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SHARES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``m``, ``n`` and ``length`` count units: the compiler sees how rows are aligned, and any size takes this code."""
    m, n, length = m * M_UNIT, n * N_UNIT, length * UNIT
    client = tl.program_id(1).to(tl.int64)
    tile, share = tl.program_id(0) // SHARES, tl.program_id(0) % SHARES
    across = tl.cdiv(n, COLUMNS)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    a += client * a_stride
    b += client * b_stride
    part = tl.cdiv(tl.cdiv(length, DEPTH), SHARES) * DEPTH
    first, last = share * part, min(length, (share + 1) * part)
    if not A_TURNED:  # weights, as a rule, which the last step's update may have driven out of the cache
        _fetch(b, n * length)
    await_inputs()
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(first, last, DEPTH, num_stages=STAGES):
        k = begin + tl.arange(0, DEPTH)
        left = _part(a, row, k, m, length, A_TURNED)
        right = _part(b, k, column, length, n, B_TURNED)
        total = tl.dot(left, right, total, input_precision="tf32")
    at = client * out_stride + row[:, None] * n + column[None, :]
    inside = (row[:, None] < m) & (column[None, :] < n)
    each = tl.zeros([COLUMNS], tl.float32)
    if bias is not None:
        each = tl.load(bias + client * bias_stride + column, mask=column < n, other=0.0).to(tl.float32)
    number = client * (tl.num_programs(0) // SHARES) + tile
    total += tl.where(share == 0, each, 0.0)[None, :]
    _store_share(total, out + at, inside, partial, arrived, number, share, ROWS, COLUMNS, SHARES)


def product(a: Tensor, b: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """a [C, m, length] times b [C, length, n], either of which may be a transposed view, plus bias [C, n]."""
    (count, m, length), n, tiling = a.shape, b.shape[-1], None
    if launches_overlap() and computes(a, b, out):
        tiling = tiling_of(m, n, length, count, a.element_size(), _turned(a), _turned(b))
    if tiling is not None:
        out = a.new_empty(count, m, n) if out is None else out
        tiled_product(a, b, out, tiling, bias)
        return out
    if bias is not None:  # which torch would copy into every row by itself, and slowly
        return spread(bias, m).baddbmm_(a, b)
    return library_product(a, b, out)


def computes(a: Tensor, b: Tensor, out: Tensor | None = None) -> bool:
    """Whether the kernel can compute it, and as precisely as is asked."""
    stored = [x.mT if _turned(x) else x for x in (a, b)] + ([] if out is None else [out])
    in_tf32 = a.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    if not (in_tf32 or a.dtype in (torch.bfloat16, torch.float16)):
        return False
    return all(x.dtype == a.dtype and x[0].is_contiguous() and x[0].numel() < MOST_ELEMENTS for x in stored)


def _turned(x: Tensor) -> bool:
    """Whether a matrix of each client is stored column by column."""
    return not x[0].is_contiguous() and x.mT[0].is_contiguous()


@cache
def tiling_of(m: int, n: int, length: int, count: int, size: int, a_turned: bool, b_turned: bool) -> Tiling | None:
    """By shape alone, so that a product has the same bits in every run; None where the library is faster.

    Measured on an H200: a tile should be as small as leaves no more programs than there are processors, and long sums
    are shared where that leaves processors idle.
    """

    def tiles(rows: int, columns: int) -> int:
        return triton.cdiv(m, rows) * triton.cdiv(n, columns) * count

    rows, columns, depth, most = 32, 32, 64, AT_ONCE
    if size == 2 or b_turned:
        # Hopper's own instructions: from 64 rows on, and float32 only as it lies along the axis of the sum.
        if tiles(64, 32) >= 48 or (length >= 1024 and m > 64):
            sizes = [(r, c) for r, c in SIZES if (r == 64 or m > 64) and (c == 32 or n > 32)]
            rows, columns = next((each for each in sizes if tiles(*each) <= AT_ONCE), (128, 32))
            depth = (256 if a_turned and length > LONG and (rows, columns) == (64, 32) else 128) // size
            most = 2 * AT_ONCE if rows > n else AT_ONCE
    elif a_turned and length > LONG and tiles(32, 32) > 16:
        return None
    elif tiles(32, 32) > (AT_ONCE if length <= 256 else 40):
        columns, depth = 64, 32
    if size == 4 and length <= 256:
        depth = 32
    number, shares = tiles(rows, columns), 1
    least = 128 if size == 4 and number <= 40 else 200 if a_turned else 256  # of a sum, for a program
    if length >= 2000 // size or number <= 16:
        programs = 2 * AT_ONCE if a_turned and length > LONG and number > AT_ONCE // 4 else AT_ONCE
        while shares < MOST_SHARES and 2 * shares * number <= programs and length >= 2 * shares * least:
            shares *= 2
    if number > most or rows * columns * triton.cdiv(length, shares) > LARGEST:
        return None
    return Tiling(rows, columns, depth, shares)


_arrivals: dict[tuple[int, torch.device, int], Tensor] = {}


def _arrivals_on(device: torch.device) -> Tensor:
    """Zeros for kernels on the current stream, which leave them so; a kernel of another stream may run at once."""
    key = get_ident(), device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if key not in _arrivals:
        _arrivals[key] = torch.zeros(2 * AT_ONCE, dtype=torch.int32, device=device)
    return _arrivals[key]


def tiled_product(a: Tensor, b: Tensor, out: Tensor, tiling: Tiling, bias: Tensor | None = None) -> None:
    """As ``product``, by tiles of this size."""
    (count, m, length), n, shares = a.shape, b.shape[-1], tiling.shares
    number = tiling.tiles(m, n)
    partial = arrived = None
    if shares > 1:
        partial = torch.empty(count * number * shares * tiling.rows * tiling.columns, device=a.device)
        arrived = _arrivals_on(a.device)
    units = [gcd(8, size) for size in (m if _turned(a) else 1, n, length)]  # what a row in memory is a multiple of
    _product[(number * shares, count)](
        a, b, bias, out, partial, arrived, m // units[0], n // units[1], length // units[2], a.stride(0), b.stride(0),
        0 if bias is None else bias.stride(0), out.stride(0), *units, _turned(a), _turned(b), *tiling, STAGES,
        num_warps=8 if tiling.rows == tiling.columns == 128 else 4,
    )  # fmt: skip
