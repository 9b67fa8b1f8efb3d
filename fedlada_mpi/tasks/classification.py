"""One class of several for each example."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Metric, Task, summed, whole
from .checks import check_kind, check_range
from .curves import area_under_curve, mean_defined

NO_CLASS = -1


def predicted(outputs: Tensor, dim: int = 1) -> Tensor:
    """The class with the largest output; ``NO_CLASS`` where outputs are NaN, which torch takes for the largest."""
    return outputs.argmax(dim).masked_fill(outputs.amax(dim).isnan(), NO_CLASS)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest output is that of the class, else 0: [N]."""
    return (predicted(outputs) == targets).to(outputs.dtype)


def class_hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each class whether it is the example's, and whether it was found: [N, 2 K]."""
    members = (targets[:, None] == torch.arange(outputs.shape[1], device=targets.device)).to(torch.float64)
    return torch.cat([members, members * correct(outputs, targets)[:, None]], 1)


def mean_recall(sums: np.ndarray) -> float:
    """The mean recall of the classes that occur."""
    members, found = np.split(sums, 2)
    occur = members > 0
    return float((found[occur] / members[occur]).mean()) if occur.any() else float("nan")


def one_against_rest(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The area under the curve of each class's probability, mean over the classes that occur but are not all."""
    scores = outputs.astype(np.float64)
    scores = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    return mean_defined([area_under_curve(scores[:, k], targets == k) for k in range(scores.shape[1])])


# For those who ask for them; what a run records by itself is loss and accuracy.
OPTIONAL = {
    "balanced_acc": summed(class_hits, mean_recall, "balanced accuracy", percent=True, larger_is_better=True),
    "auc": whole(one_against_rest, "area under the ROC curve", larger_is_better=True),
}


class Classification(Task):
    """Targets: int [n]; outputs: a logit for each class, [N, K]."""

    name = "classification"
    objective = "acc"
    metrics = {"acc": Metric(correct, title="accuracy", percent=True, larger_is_better=True)}
    optional = OPTIONAL
    losses = {"cross-entropy": "minus the log of the probability of the class"}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets.long(), reduction="none")

    def outputs(self) -> tuple[int, ...] | None:
        return (self.about.classes,) if self.about.classes else None

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        expected = "one integer per example: convert them, or choose another task (numbers: --task regression)"
        check_kind(targets, "iu", (1,), where, expected)
        classes = self.about.classes
        allowed = f"0 to {classes - 1}" if classes else "0 to K-1"
        good = (targets >= 0) & (targets < classes) if classes else targets >= 0
        check_range(targets, good, where, f"a class, {allowed}: number the classes from 0")
