"""Numbers, one or several for each example, and counts."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .base import About, Metric, Task, summed
from .checks import check_example, check_finite, check_kind, check_range

# Below this share of the squares, what is left of their sum after the mean is taken off is rounding.
ROUNDING = 1e-12


def columns(outputs: Tensor, targets: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Both as [N, k] of one type: targets [N] next to outputs [N, 1] would otherwise broadcast to [N, N]."""
    wide = outputs.reshape(len(outputs), -1).to(dtype or outputs.dtype)
    return wide, targets.to(wide.dtype).reshape(wide.shape)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over columns, and 1 to count the examples: [N, 2]."""
    predicted, true = columns(outputs, targets, torch.float64)
    errors = (predicted - true).square().mean(1)
    return torch.stack([errors, torch.ones_like(errors)], 1)


def root_of_mean(sums: np.ndarray) -> float:
    return float(np.sqrt(sums[0] / sums[1])) if sums[1] else float("nan")


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    predicted, true = columns(outputs, targets, torch.float64)
    return (predicted - true).abs().mean(1)


def moments(outputs: Tensor, targets: Tensor) -> Tensor:
    """1, and of every column the target, its square and the squared error: [N, 1 + 3 k]."""
    predicted, true = columns(outputs, targets, torch.float64)
    return torch.cat([torch.ones_like(true[:, :1]), true, true.square(), (predicted - true).square()], 1)


def explained(sums: np.ndarray) -> float:
    """R2: 1 - squared errors / squared deviations from the mean, mean over columns.

    The deviations come from sums of squares, of which an offset takes digits: targets around 1e4 standard deviations
    leave 8 of 16. Columns whose standard deviation is below a millionth of their size count as constant: undefined.
    """
    count = sums[0]
    if not count:
        return float("nan")
    total, squares, errors = np.split(sums[1:], 3)
    deviations = squares - total * total / count
    varied = deviations > ROUNDING * squares
    return float((1 - errors[varied] / deviations[varied]).mean()) if varied.any() else float("nan")


def deviance(outputs: Tensor, targets: Tensor) -> Tensor:
    """The Poisson deviance 2 (t log(t / mean) - (t - mean)) for outputs that are the log of the mean: [N]."""
    log_mean, true = columns(outputs, targets, torch.float64)
    return 2 * (torch.xlogy(true, true) - true * log_mean - true + log_mean.exp()).mean(1)


def squared_error_of_counts(outputs: Tensor, targets: Tensor) -> Tensor:
    return squared_error(outputs.to(torch.float64).exp(), targets)


def absolute_error_of_counts(outputs: Tensor, targets: Tensor) -> Tensor:
    return absolute_error(outputs.to(torch.float64).exp(), targets)


class Regression(Task):
    """Targets: float or int [n] or [n, k]; outputs: [N, k], for ``poisson`` the logs of the means."""

    name = "regression"
    objective = "-rmse"
    metrics: dict[str, Metric] = {
        "rmse": summed(squared_error, root_of_mean, "root mean squared error", larger_is_better=False),
        "mae": Metric(absolute_error, title="mean absolute error", larger_is_better=False),
        "r2": summed(moments, explained, "R2", larger_is_better=True),
    }
    losses = {
        "squared": "(output - target)^2",
        "absolute": "|output - target|",
        "huber": "half the square up to an error of 1, the error less 1/2 beyond",
        "poisson": "for counts; outputs are the log of the mean: exp(output) - target * output",
    }

    def __init__(self, about: About, loss: str = ""):
        super().__init__(about, loss)
        if self.loss_name == "poisson":
            self.objective = "-deviance"
            self.metrics = {
                "deviance": Metric(deviance, title="mean Poisson deviance", larger_is_better=False),
                "rmse": summed(
                    squared_error_of_counts, root_of_mean, "root mean squared error", larger_is_better=False
                ),
                "mae": Metric(absolute_error_of_counts, title="mean absolute error", larger_is_better=False),
            }

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        predicted, true = columns(outputs, targets)
        if self.loss_name == "squared":
            each = (predicted - true).square()
        elif self.loss_name == "absolute":
            each = (predicted - true).abs()
        elif self.loss_name == "huber":
            each = F.huber_loss(predicted, true, reduction="none")
        else:
            each = predicted.exp() - true * predicted
        return each.mean(1) if each.shape[1] > 1 else each[:, 0]

    def outputs(self) -> tuple[int, ...] | None:
        return None if self.about.targets is None else self.about.targets.shape or (1,)

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        expected = "one number per example, or [n, k] numbers (yes or no: --task multilabel or classification)"
        check_kind(targets, "iuf", (1, 2), where, expected)
        check_example(targets, None if self.about.targets is None else self.about.targets.shape, where)
        check_finite(targets, where)
        if self.loss_name == "poisson":
            check_range(targets, targets >= 0, where, "0 or more with --loss poisson: choose another --loss")
