"""Sums over the rows of matrices, such as the gradient of a bias over all pixels of all images."""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_support import TILE, await_inputs, check, jit, own_channels, power, tl, triton


@jit(do_not_specialize=["length", "chunks"])
def _column_sums(
    rows, times, partial, length, chunks, stride, WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    chunk, lane = own_channels(WIDTH, LANES)
    rows += client * length * WIDTH
    if times is not None:
        times += client * length * WIDTH
    total = tl.zeros([ROWS, LANES], tl.float32)
    for begin in tl.static_range(0, CHUNK, ROWS):
        row = chunk * CHUNK + begin + tl.arange(0, ROWS)[:, None]
        mask = (row < length) & (lane < WIDTH)
        value = tl.load(rows + row * WIDTH + lane, mask=mask, other=0.0).to(tl.float32)
        if times is not None:
            value *= tl.load(times + row * WIDTH + lane, mask=mask, other=0.0).to(tl.float32)
        total += value
    at = partial + client * stride + chunk * WIDTH + lane
    tl.store(at, tl.sum(total, 0, keep_dims=True).to(partial.dtype.element_ty), mask=lane < WIDTH)


CHUNK = 256  # rows that a program adds up


def column_sums(target: Tensor, rows: Tensor, times: Tensor | None = None) -> None:
    """target [C, n] = the sums over the rows of [C, length, n], or of its products with another such tensor."""
    count, length, width = rows.shape
    times = None if times is None else times.contiguous()
    rows, chunks = rows.contiguous(), triton.cdiv(length, CHUNK)
    lanes, chunk = min(power(width), 64), min(power(length), CHUNK)
    check("sums of columns", rows)
    partial = target
    if chunks > 1:
        partial = torch.empty(count, chunks, width, dtype=torch.float32, device=rows.device)
    grid = (chunks * triton.cdiv(width, lanes), count)
    tile = (chunk, min(chunk, TILE // lanes), lanes)
    _column_sums[grid](rows, times, partial, length, chunks, partial.stride(0), width, *tile)
    if chunks > 1:
        column_sums(target, partial)
