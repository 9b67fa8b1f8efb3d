"""Whole numbers for the values that clients send, on a grid that all know in advance.

n = rint(w * clip(v - base, -R, R) / step), step = R 2^(k - 62), where the weights w of all participants add up to at
most 2^k. Then |sum of n| is at most 2^62, and half a unit per participant: it fits into 64 bits, is exact in any order,
and nothing about the values has to be known to choose the grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

BITS = 62
WORDS = 8  # of 32 bits, for a single number
LARGEST = 2.0**190  # number, of which all together fit into its words
BLOCK = {"cpu": 1 << 16, "cuda": 1 << 26}  # values at a time: a CPU's stay in its cache


@dataclass(frozen=True)
class PublicGrid:
    """Values up to ``limit`` with weights that add up to at most ``weights``."""

    limit: float
    weights: float

    @cached_property
    def step(self) -> float:
        """The distance of neighbouring values, a power of two."""
        exponent = math.ceil(math.log2(self.limit)) + math.ceil(math.log2(max(1.0, self.weights)))
        return math.ldexp(1.0, exponent - BITS)

    def add(self, total: Tensor, row: Tensor, weight: float, base: Tensor | None = None) -> int:
        """Add a weighted row to the integers ``total``, modulo 2^64; returns how many values were out of range."""
        clipped, size = 0, BLOCK[row.device.type]
        for first in range(0, len(row), size):
            part = slice(first, first + size)
            values = row[part].double()
            if base is not None:
                values -= base[part]
            least, most = torch.stack(torch.aminmax(values)).tolist()
            if max(-least, most) > self.limit:
                clipped += int((values.abs() > self.limit).sum())
                values.clamp_(-self.limit, self.limit)
            total[part] += values.mul_(weight / self.step).round_().long()
        return clipped

    def decode(self, total: Tensor, result: Tensor) -> None:
        """The integers ``total`` as what they stand for, into ``result``."""
        size = BLOCK[total.device.type]
        for first in range(0, len(total), size):
            part = slice(first, first + size)
            result[part] = total[part].double().mul_(self.step)


class NumberGrid(PublicGrid):
    """For single numbers, whose size nobody knows in advance: a sum is sent in several words.

    ``limit`` is a usual size, which says how finely numbers are rounded; larger ones are rounded as finely.
    """

    def whole(self, values: np.ndarray, weights: np.ndarray | float = 1.0) -> int:
        """The weighted sum of some numbers, up to ``LARGEST``."""
        return sum(map(int, np.rint(values * (weights / self.step)).tolist()))

    def real(self, whole: int) -> float:
        return whole * self.step
