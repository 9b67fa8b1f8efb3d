"""Named flat vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def named_rows(names: Sequence[str], size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Zero vectors that are adjacent in memory, so that several can travel in one call."""
    return dict(zip(names, torch.zeros(len(names), size, dtype=dtype, device=device), strict=True))
