"""Whole numbers of any size in words of 32 bits: in int64, sums of the words neither round nor overflow."""

from __future__ import annotations

from collections.abc import Sequence

WORD = 32  # bits


def split(value: int, count: int) -> list[int]:
    """In ``count`` words, the lowest first; the last one has the sign."""
    low = [(value >> WORD * i) & ((1 << WORD) - 1) for i in range(count - 1)]
    return [*low, value >> WORD * (count - 1)]


def joined(words: Sequence[int]) -> int:
    """What words stand for, or sums of words."""
    return sum(word << WORD * i for i, word in enumerate(words))
