"""Loss and accuracy of one model on a set of images that lie on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import Normaliser

# Large enough to fill a GPU; small enough that a CPU's caches still help.
BATCH = {"cuda": 5000, "cpu": 250}


@torch.no_grad()
def evaluate(
    gradient, x: Tensor, images: Tensor, labels: Tensor, normalise: Normaliser, dtype: torch.dtype
) -> list[float]:
    """[sum of losses, number correct, number of images]."""
    totals = torch.zeros(2, dtype=torch.float64, device=images.device)
    batch = BATCH[images.device.type]
    for start in range(0, len(images), batch):
        part, truth = images[start : start + batch], labels[start : start + batch]
        logits = gradient.logits(x, normalise(part, dtype))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        totals[0] += F.cross_entropy(wide, truth, reduction="sum")
        totals[1] += (wide.argmax(1) == truth).sum()
    return [*totals.tolist(), len(images)]
