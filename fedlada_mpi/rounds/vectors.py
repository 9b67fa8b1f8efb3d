"""Named flat vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

# Elements that a CPU takes at a time, so that they stay in its cache, and of which it makes one sum. Whole instructions
# of vectors, so that no element is computed otherwise than in the whole vector.
SUM, BLOCK = 1 << 15, 1 << 17
ROW = 128  # elements whose squares ``quick_norm`` adds up in float32
SMALL = 1e-10  # norm of which some squares may be below the range of float32


def named_rows(names: Sequence[str], size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Zero vectors that are adjacent in memory, so that several can travel in one call."""
    return dict(zip(names, torch.zeros(len(names), size, dtype=dtype, device=device), strict=True))


def is_finite(vector: Tensor) -> bool:
    """Whether all of its numbers are."""
    # On a CPU, a product takes a tenth of the time; its result can be infinite where no number is.
    if not vector.is_cuda and math.isfinite(float(torch.dot(vector, vector))):
        return True
    return math.isfinite(float(norm(vector)))


def norm(vector: Tensor) -> Tensor:
    """In double; the same bits on any number of threads, and wherever the vector is in memory."""
    if vector.is_cuda or len(vector) <= BLOCK:
        return torch.linalg.vector_norm(vector, dtype=torch.float64)
    # New memory for all of it in double would take longer than the norm. ``torch.dot`` would be faster than sums, but
    # their order in it depends on the number of threads; these are one thread's each.
    total, squares = 0.0, torch.empty(BLOCK // SUM, SUM, dtype=torch.float64)
    for block in vector.split(BLOCK):
        if len(block) < BLOCK:
            squares.zero_()
        squares.view(-1)[: len(block)].copy_(block)
        total += sum(squares.mul_(squares).sum(1).tolist())
    return torch.tensor(total, dtype=torch.float64).sqrt_()


def quick_norm(vector: Tensor) -> Tensor:
    """``norm`` to some 1e-7, for reports; on a CPU in a third of the time."""
    if vector.is_cuda or vector.dtype != torch.float32 or len(vector) <= BLOCK:
        return norm(vector)
    of_rows = torch.linalg.vector_norm(vector[: len(vector) // ROW * ROW].view(-1, ROW), dim=1)
    rest = vector[of_rows.numel() * ROW :]
    found = math.hypot(math.sqrt(np.square(of_rows.numpy(), dtype=np.float64).sum()), float(norm(rest)))
    in_range = SMALL < found < math.inf  # of float32, in which the squares are; not so with NaN
    if not in_range and vector.numpy().any():
        return norm(vector)
    return torch.tensor(found, dtype=torch.float64)


def quick_row_norms(rows: Tensor) -> Tensor:
    """Row by row: all rows at once would take twice their memory."""
    return torch.stack([quick_norm(row) for row in rows])


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of one size, in blocks on a CPU and whole on a GPU."""
    if vectors[0].is_cuda:
        yield vectors
    else:
        yield from zip(*(vector.split(BLOCK) for vector in vectors), strict=True)


def add_weighted(total: Tensor, rows: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Add the rows one after another, ``total`` being read from memory once."""
    for block, *parts in blocks(total, *rows):
        for part, weight in zip(parts, weights, strict=True):
            block.add_(part, alpha=weight)
