"""Mean and standard deviation of data that is in several silos, from sums of whole numbers.

A silo computes n, the sum of x and the sum of x^2 of its training rows, in units of 2^-150 and 2^-300, which are the
same for everybody, and in which single precision is exact. As integers they are cut into words of 32 bits; words of all
silos are added up in int64, in any order, masked or not, without rounding and without overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ...support.errors import UserError
from ...support.words import joined, split
from ..normalise import rounded
from ..rows import Ragged, Rows, values_of

if TYPE_CHECKING:
    from ...mpi import World

LARGEST = 2**64  # |x|
UNIT = 150  # bits behind the point of a sum of x; twice as many of x^2
WORDS, SQUARE_WORDS = 8, 15  # of a sum: 2^64 times 2^32 rows, and the bits behind the point; the last one has the sign
# Below this share of the mean square, a variance is what rounding the squares has left of zero.
CONSTANT = 2.0**-48

SumOf: TypeAlias = "Callable[[np.ndarray], np.ndarray]"  # of int64 over all ranks, on every rank; wraps around


@dataclass(frozen=True)
class Sums:
    """Of the rows of one array, by column."""

    count: int
    x: tuple[int, ...]
    squares: tuple[int, ...]

    @classmethod
    def of(cls, array: Rows, what: str) -> Sums:
        """Of each column of a table, of each channel of images, otherwise of all numbers; ``what`` is in errors."""
        columns = by_column(array)
        if columns.size and not np.abs(columns, dtype=np.float64).max() <= LARGEST:
            raise UserError(f"{what}: numbers beyond 2^64, expected smaller ones to normalise by: choose other units")
        added = _of_bytes if columns.dtype == np.uint8 else _of_floats
        whole = [(_units(x, UNIT), _units(squares, 2 * UNIT)) for x, squares in map(added, columns.T)]
        return cls(len(columns), tuple(x for x, _ in whole), tuple(squares for _, squares in whole))

    @classmethod
    def nothing(cls, columns: int) -> Sums:
        return cls(0, (0,) * columns, (0,) * columns)

    def words(self) -> np.ndarray:
        parts = [*(split(x, WORDS) for x in self.x), *(split(each, SQUARE_WORDS) for each in self.squares)]
        return np.array([self.count, *(word for part in parts for word in part)], np.int64)

    @classmethod
    def from_words(cls, words: np.ndarray, columns: int) -> Sums:
        count, *rest = words.tolist()
        x, squares = rest[: columns * WORDS], rest[columns * WORDS :]
        return cls(
            count,
            tuple(joined(x[i * WORDS : (i + 1) * WORDS]) for i in range(columns)),
            tuple(joined(squares[i * SQUARE_WORDS : (i + 1) * SQUARE_WORDS]) for i in range(columns)),
        )

    def statistics(self, image: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of each column, 1 where all numbers are equal; of images, of pixels between 0 and 1."""
        each = [
            self._pixels(*pair) if image else self._numbers(*pair) for pair in zip(self.x, self.squares, strict=True)
        ]
        return tuple(mean for mean, _ in each), tuple(std for _, std in each)

    def _pixels(self, x: int, squares: int) -> tuple[float, float]:
        total, squares, n = x >> UNIT, squares >> 2 * UNIT, max(1, self.count)
        return total / n / 255, math.sqrt(max(0, squares * n - total * total)) / n / 255 or 1.0

    def _numbers(self, x: int, squares: int) -> tuple[float, float]:
        n = max(1, self.count)
        mean, mean_square = Fraction(x, n << UNIT), Fraction(squares, n << 2 * UNIT)
        variance = mean_square - mean * mean
        std = math.sqrt(variance) if variance > mean_square * Fraction(CONSTANT) else 0.0
        return rounded(float(mean)), rounded(std) or 1.0


def by_column(array: Rows) -> np.ndarray:
    """Numbers [n, columns] of which each column has a mean of its own: those of a table, or the channels of images."""
    values = values_of(array)
    if values.dtype == np.uint8 and values.ndim == 4:
        return values.reshape(-1, values.shape[3])
    return values if values.ndim == 2 and not isinstance(array, Ragged) else values.reshape(-1, 1)


def _of_bytes(column: np.ndarray) -> tuple[int, int]:
    counts, levels = np.bincount(column, minlength=256), np.arange(256)
    return int(counts @ levels), int(counts @ levels**2)


def _of_floats(column: np.ndarray) -> tuple[float, float]:
    wide = column.astype(np.float64)
    return math.fsum(wide), math.fsum(wide * wide)


def _units(value: float, bits: int) -> int:
    return round(Fraction(value) * (1 << bits))


def agree_statistics(
    world: World, mine: Mapping[str, Sums], sum_of: SumOf | None = None, image: bool = False
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Mean and deviation over all ranks, by array; collective.

    ``mine``: a rank without data has ``Sums.nothing``. ``sum_of``: masked, or as it is by default.
    """
    if not mine:
        return {}
    total = (sum_of or world.sum_integers)(np.concatenate([sums.words() for sums in mine.values()]))
    found, first = {}, 0
    for name, sums in mine.items():
        length = len(sums.words())
        found[name] = Sums.from_words(total[first : first + length], len(sums.x)).statistics(image)
        first += length
    return found
