"""Any number of labels for each example."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Metric, Task, summed, whole
from .checks import check_example, check_finite, check_kind, check_range
from .curves import area_under_curve, mean_defined


def hits_and_misses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Labels found, found wrongly and missed: [N, 3]. A label is found where its output is above 0."""
    given, true = outputs > 0, targets > 0
    return torch.stack([(given & true).sum(1), (given & ~true).sum(1), (~given & true).sum(1)], 1).to(torch.float64)


def f1(sums: np.ndarray) -> float:
    """The harmonic mean of precision and recall over all labels (micro); NaN where there are no labels at all."""
    found, wrong, missed = sums
    labels = 2 * found + wrong + missed
    return float(2 * found / labels) if labels else float("nan")


def label_auc(outputs: np.ndarray, targets: np.ndarray) -> float:
    """The area under the curve of each label, mean over the labels that some examples have and some have not."""
    return mean_defined([area_under_curve(outputs[:, k], targets[:, k] > 0) for k in range(outputs.shape[1])])


class Multilabel(Task):
    """Targets: 0 or 1, [n, L]; outputs: a logit for each label, [N, L]."""

    name = "multilabel"
    objective = "f1"
    metrics: dict[str, Metric] = {
        "f1": summed(hits_and_misses, f1, "F1 score", percent=True, larger_is_better=True),
        "auc": whole(label_auc, "area under the ROC curve", larger_is_better=True),
    }
    losses = {"binary-cross-entropy": "mean over labels of minus the log of the probability of the truth"}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none").mean(1)

    def outputs(self) -> tuple[int, ...] | None:
        return None if self.about.targets is None else self.about.targets.shape or None

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        expected = "0 or 1 for every label, [n, labels] (one class per example: --task classification)"
        check_kind(targets, "biuf", (2,), where, expected)
        check_example(targets, self.outputs(), where)
        check_finite(targets, where)
        check_range(targets, (targets == 0) | (targets == 1), where, "0 (without the label) or 1 (with it)")
