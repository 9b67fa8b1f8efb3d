"""A task's loss and metrics as sums over examples: they add up over batches and ranks, and give values in the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..support.errors import UserError, shortened
from ..support.user_code import users_code
from .base import Loss, Metric, Task, is_built_in
from .classification import Classification, predicted
from .client_loss import ClientLoss, of_examples, wide

PROBE = 2  # examples on which metrics are tried, for the numbers that they give


class Scores:
    """What is added up of every example: a few numbers per metric, the loss first.

    ``columns`` names them; of a part of the data, the number of examples follows their sums.
    """

    def __init__(self, task: Task, output_shape: tuple[int, ...]):
        self.task, self.output_shape = task, output_shape
        self.own_code = not is_built_in(type(task))
        self.of_batches = task.batch_loss is not None  # whether an example's loss depends on the others of its batch
        self.metrics = {name: as_metric(given) for name, given in task.metrics.items()}
        self.summed = {name: metric for name, metric in self.metrics.items() if not metric.whole}
        self.whole = {name: metric for name, metric in self.metrics.items() if metric.whole}
        probe = torch.zeros(PROBE, *output_shape), ClientLoss(task).targets_like(PROBE)
        self.widths = {name: len(rows) for name, rows in self._rows(*probe).items()}
        self.columns = tuple(
            name if width == 1 else f"{name}.{i}" for name, width in self.widths.items() for i in range(width)
        )

    def _rows(self, outputs: Tensor, targets: Tensor) -> dict[str, list[Tensor]]:
        """The numbers [N] of each example, by metric."""
        with _unchanged("the loss", outputs, targets):
            if self.task.batch_loss is None:
                rows = {"loss": _loss_rows(self.task.loss(outputs, targets))}
            else:
                present = torch.ones(len(outputs), dtype=torch.bool, device=outputs.device)
                # A batch's loss belongs to all of its examples.
                rows = {"loss": [self.task.batch_loss(outputs, targets, present).expand(len(outputs))]}
        for name, metric in self.summed.items():
            what = f"metric {name}"
            with users_code(what, "a function of (outputs, targets)"), _unchanged(what, outputs, targets):
                found = metric.function(outputs, targets)
                rows[name] = _metric_rows(name, metric, found, len(outputs))
        return rows

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The numbers of every example, [columns, N], in double."""
        rows = self._rows(wide(outputs), targets)
        return torch.stack([row.double() for several in rows.values() for row in several])

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Their sums, [columns]."""
        return self.each(outputs, targets).sum(1)

    def values(self, sums: Sequence[float] | np.ndarray) -> dict[str, float | None]:
        """The loss and the summed metrics, from the sums of ``columns`` and the number of examples.

        None: there are no examples; NaN: undefined.
        """
        count, place, found = float(sums[-1]), 0, dict[str, float | None]()
        for name, width in self.widths.items():
            own = np.asarray(sums[place : place + width], np.float64)
            place += width
            found[name] = self._value(name, own, count) if count else None
        return found

    def values_by_column(self, sums: np.ndarray) -> dict[str, np.ndarray]:
        """As ``values``, of many groups of examples at once: [columns + 1, groups] to [groups], NaN where undefined."""
        count, place, found = sums[-1], 0, dict[str, np.ndarray]()
        for name, width in self.widths.items():
            own = sums[place : place + width]
            place += width
            metric = self.summed.get(name)
            if metric is not None and metric.value is not None:
                found[name] = np.array(
                    [self._value(name, each, n) if n else math.nan for each, n in zip(own.T, count, strict=True)]
                )
                continue
            with np.errstate(invalid="ignore", divide="ignore"):
                found[name] = own[0] / (count if width == 1 else np.where(own[1] > 0, own[1], np.nan))
        return found

    def _value(self, name: str, sums: np.ndarray, count: float) -> float:
        metric = self.summed.get(name)
        if metric is not None and metric.value is not None:
            with users_code(f"metric {name}", "a function of the sums that gives a number"), np.errstate(all="ignore"):
                return as_number(name, metric.value(sums))
        if len(sums) == 1:
            return float(sums[0]) / count
        return float(sums[0] / sums[1]) if sums[1] else math.nan

    def of_all(self, outputs: np.ndarray, targets: np.ndarray) -> dict[str, float | None]:
        """The metrics of all predictions at once."""
        found: dict[str, float | None] = {}
        for name, metric in self.whole.items():
            if not len(outputs):
                found[name] = None
                continue
            expected = "a function of all outputs and targets that gives a number"
            with users_code(f"metric {name}", expected), np.errstate(all="ignore"):
                # A user's function may sort its arrays in place, which are also those of other metrics and of training.
                given = (outputs.copy(), targets.copy()) if self.own_code else (outputs, targets)
                found[name] = as_number(name, metric.function(*given))
        return found


class ClassScores(Scores):
    """Cross-entropy and accuracy; sums of a batch are in the precision of its losses."""

    summed: dict[str, Metric] = {}
    whole: dict[str, Metric] = {}
    own_code = of_batches = False
    columns = ("loss", "acc")
    widths = {"loss": 1, "acc": 1}

    def __init__(self, classes: int = 0):
        self.output_shape = (classes,)
        self.metrics = {name: as_metric(given) for name, given in Classification.metrics.items()}

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = wide(outputs)
        losses = F.cross_entropy(logits, targets, reduction="none")
        return torch.stack([losses.double(), (predicted(logits) == targets).double()])

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = wide(outputs)
        loss, correct = F.cross_entropy(logits, targets, reduction="sum"), predicted(logits) == targets
        return torch.stack([loss.double(), correct.sum().double()])


@contextmanager
def _unchanged(what: str, outputs: Tensor, targets: Tensor) -> Iterator[None]:
    """Refuse a function that writes to what it is given: others get it, too, and targets are those of training."""
    before = outputs._version, targets._version
    yield
    if (outputs._version, targets._version) != before:
        raise UserError(f"{what} changes its outputs or targets in place: work on a copy, as by .clone()")


def as_metric(given: Any) -> Metric:
    return given if isinstance(given, Metric) else Metric(given)


def as_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"metric {name}: got {shortened(value)}, expected a number") from None


def _loss_rows(found: Loss) -> list[Tensor]:
    if isinstance(found, tuple):
        return [each.flatten() for each in found]
    return [of_examples(found)]


def _metric_rows(name: str, metric: Metric, found: Any, count: int) -> list[Tensor]:
    """The numbers of each example, in rows."""
    if isinstance(found, tuple) and len(found) == 2:
        rows = [torch.as_tensor(each) for each in found]
    elif isinstance(found, Tensor) and found.ndim == 2 and metric.value is not None:
        rows = list(found.unbind(1))
    elif isinstance(found, Tensor) and found.ndim == 1:
        rows = [found]
    else:
        shape = list(found.shape) if isinstance(found, Tensor) else shortened(found)
        raise UserError(
            f"metric {name}: got {shape} for {count} examples, expected a number of each, [{count}]; (sums, counts); "
            "[N, k] by fedlada_mpi.summed(function, value); or fedlada_mpi.whole(function) of all predictions"
        )
    if any(row.shape != (count,) for row in rows):
        raise UserError(f"metric {name}: got {list(rows[0].shape)} for {count} examples, expected one number of each")
    return rows
