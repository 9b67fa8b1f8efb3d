"""A class for every pixel or voxel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .base import Metric, Task
from .checks import check_example, check_kind, check_range
from .classification import NO_CLASS, predicted

IGNORED = 255  # pixels that are neither learnt nor tested


def pixel_losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of outputs [N, K, ...] over the pixels of each example that count: their sums and numbers, [N]."""
    counted = targets != IGNORED
    classes = targets.long().masked_fill(~counted, 0)
    losses = -outputs.log_softmax(1).gather(1, classes[:, None])[:, 0]
    sums = losses.masked_fill(~counted, 0.0).flatten(1).sum(1)
    return sums, counted.flatten(1).sum(1).to(outputs.dtype)


def sizes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels of every class above 0 in both, in the prediction and in the target: three times [N, K - 1]."""
    classes = outputs.shape[1]
    counted = targets != IGNORED
    # Pixels that do not count, and those without a class, go to a class of their own, which is cut off.
    found = predicted(outputs)
    found = found.masked_fill(~counted | (found == NO_CLASS), classes)
    true = targets.long().masked_fill(~counted, classes)
    both = true.masked_fill(found != true, classes)

    def count(labels: Tensor) -> Tensor:
        labels = labels.flatten(1)
        # Whole numbers: the same in whatever order a GPU adds them.
        totals = torch.zeros(len(labels), classes + 1, dtype=torch.float64, device=labels.device)
        return totals.scatter_add(1, labels, torch.ones_like(labels, dtype=torch.float64))[:, 1:classes]

    return count(both), count(found), count(true)


def dice(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """2 |A and B| / (|A| + |B|), added up over the classes above 0 that an example has, and the number of these."""
    both, predicted, true = sizes(outputs, targets)
    return _over_classes(2 * both, predicted + true)


def iou(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """|A and B| / |A or B|, as ``dice``."""
    both, predicted, true = sizes(outputs, targets)
    return _over_classes(both, predicted + true - both)


def _over_classes(part: Tensor, all_of_it: Tensor) -> tuple[Tensor, Tensor]:
    """A class that is neither in the target nor in the prediction of an example is left out of its mean."""
    return (part / all_of_it.clamp(min=1)).sum(1), (all_of_it > 0).sum(1).to(part.dtype)


class Segmentation(Task):
    """Targets: uint8 or int [n, (depth,) rows, columns], 255 is ignored; outputs: [N, K, (depth,) rows, columns]."""

    name = "segmentation"
    objective = "dice"
    metrics = {
        "dice": Metric(dice, title="Dice coefficient", percent=True, larger_is_better=True),
        "iou": Metric(iou, title="intersection over union", percent=True, larger_is_better=True),
    }
    losses = {"cross-entropy": "mean over pixels of minus the log of the probability of the class; 255 is ignored"}

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return pixel_losses(outputs, targets)

    def outputs(self) -> tuple[int, ...] | None:
        if self.about.targets is None or not self.about.classes:
            return None
        return (self.about.classes, *self.about.targets.shape)

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        expected = "a class for every pixel, integers [n, rows, columns] or [n, depth, rows, columns]"
        check_kind(targets, "iu", (3, 4), where, expected)
        check_example(targets, None if self.about.targets is None else self.about.targets.shape, where)
        most = min(self.about.classes or IGNORED, IGNORED)
        good = ((targets >= 0) & (targets < most)) | (targets == IGNORED)
        check_range(targets, good, where, f"a class, 0 to {most - 1}, or {IGNORED} for pixels to ignore")
