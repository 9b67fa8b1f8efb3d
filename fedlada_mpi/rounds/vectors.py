"""Named flat vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def named_rows(names: Sequence[str], size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Zero vectors that are adjacent in memory, so that several can travel in one call."""
    return dict(zip(names, torch.zeros(len(names), size, dtype=dtype, device=device), strict=True))


def is_finite(vector: Tensor) -> bool:
    """Whether all of its numbers are."""
    # On a CPU, a product takes a tenth of the time; its result can be infinite where no number is.
    if not vector.is_cuda and math.isfinite(float(torch.dot(vector, vector))):
        return True
    return math.isfinite(float(torch.linalg.vector_norm(vector, dtype=torch.float64)))
