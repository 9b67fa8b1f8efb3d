"""Dropout with the numbers of ``support/randomness.py`` in one launch, which takes some thirty in plain code."""

from __future__ import annotations

from math import ceil

import numpy as np
import torch
from torch import Tensor

from ..support.randomness import FIRST, GOLDEN, SECOND
from .triton_support import TILE, await_inputs, jit, tl, triton

BITS = 53  # of a uniform number
_GOLDEN, _FIRST, _SECOND = (tl.constexpr(n) if tl else n for n in (GOLDEN, FIRST, SECOND))


@jit
def _shifted(z, COUNT: tl.constexpr):
    return (z >> COUNT) & ((1 << (64 - COUNT)) - 1)


@jit
def _mix(z):
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


@jit(do_not_specialize=["place", "size", "limit"])
def _dropout(x, keys, out, kept, place, size, limit, factor, BITS: tl.constexpr, TILE: tl.constexpr):
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    key = _mix(tl.load(keys + client + tl.arange(0, 1)) + place)
    keep = _shifted(_mix(key + (at + 1) * _GOLDEN), 64 - BITS) < limit
    value = tl.load(x + client * size + at, mask=at < size, other=0.0).to(tl.float32)
    value = value * keep.to(tl.float32) * factor
    tl.store(out + client * size + at, value.to(out.dtype.element_ty), mask=at < size)
    tl.store(kept + client * size + at, keep.to(tl.uint8), mask=at < size)


def dropout(x: Tensor, keys: Tensor, place: int, p: float) -> tuple[Tensor, Tensor]:
    """x [C, ...] with elements kept, and scaled, with probability 1 - p < 1; and which of them are.

    ``place``: of the operation in its step, as ``Draws`` has it.
    """
    x = x.contiguous()
    out, kept, size = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8), x[0].numel()
    limit = ceil((1 - p) * 2**BITS)  # u < 1 - p for u of BITS bits
    factor = float(np.float32(1) / np.float32(1 - p))  # as torch divides by a number on a GPU
    _dropout[(triton.cdiv(size, TILE // 2), len(x))](
        x, keys.contiguous(), out, kept, place, size, limit, factor, BITS, TILE // 2
    )  # fmt: skip
    return out, kept.view(torch.bool)
