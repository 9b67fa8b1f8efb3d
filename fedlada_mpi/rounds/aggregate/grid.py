"""Floats on a grid, as whole numbers, whose sums are exact in any order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}  # values at a time: a CPU's stay in its cache


def block(like: Tensor) -> int:
    return BLOCK[like.device.type]


class Grid:
    """Floats as whole numbers of the same width.

    E is the biased exponent of a coordinate's largest |v|, so that |v| < 2^(E - bias). Weights w add up to at most 2^k.
    Then n = round(w * v / 2^g) with g = E - bias + k - bits adds up to at most 2^bits, and half a unit per participant.
    """

    def __init__(self, integer: torch.dtype, exponent: torch.dtype, mantissa: int, bias: int):
        self.integer, self.exponent, self.mantissa, self.bias = integer, exponent, mantissa, bias
        self.bits = integer.itemsize * 8 - 2
        powers = np.arange(2 * bias + 1) - bias
        # The inverse of the two largest exponents is not a normal number: such sums are not finite.
        self.up = torch.from_numpy(np.append(np.ldexp(1.0, -powers), [0.0, 0.0]))
        self.down = torch.from_numpy(np.append(np.ldexp(1.0, powers), [np.inf, np.inf]))

    def exponents(self, rows: Tensor) -> Tensor:
        """Of the largest element of every column; 0 without rows."""
        found = torch.zeros(rows.shape[1], dtype=self.exponent, device=rows.device)
        if len(rows):
            for part in _blocks(rows):
                largest = rows[:, part].abs().amax(0)
                found[part] = (largest.view(self.integer) >> self.mantissa).to(self.exponent)
        return found

    def whole(self, rows: Tensor, weights: np.ndarray, exponents: Tensor, k: int, result: Tensor) -> None:
        """The sum of the weighted rows, into the integers ``result``."""
        factors = torch.from_numpy(np.ldexp(weights, self.bits - k)).to(rows.device, rows.dtype).unsqueeze(1)
        powers = self.up.to(rows.device, rows.dtype)
        result.zero_()
        if len(rows):
            for part in _blocks(rows):
                scaled = rows[:, part] * powers.index_select(0, exponents[part].int())
                torch.sum(scaled.mul_(factors).round_().to(self.integer), 0, dtype=self.integer, out=result[part])

    def real(self, whole: Tensor, exponents: Tensor, k: int, result: Tensor) -> None:
        """The integers ``whole`` as what they stand for, into ``result``."""
        powers = self.down.to(whole.device)
        for part in _blocks(whole.unsqueeze(0)):
            values = whole[part].double().mul_(math.ldexp(1.0, k - self.bits))
            result[part] = values.mul_(powers.index_select(0, exponents[part].int()))


GRIDS = {
    torch.float32: Grid(torch.int32, torch.uint8, mantissa=23, bias=126),
    torch.float64: Grid(torch.int64, torch.int16, mantissa=52, bias=1022),
}


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Columns of ``rows`` to work on at a time."""
    step = max(1, block(rows) // len(rows))
    return (slice(first, first + step) for first in range(0, rows.shape[1], step))
