"""The columns of metrics.jsonl, by name: what is evaluated, counted, timed and diagnosed.

A metric of the task has a column for each part of the data: ``OBJECTIVE.of("test")`` is ``test_acc``. The objective
decides which round is the best, and in which round a target is reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PARTS = ("train", "test", "val")  # of the data, that models are evaluated on


@dataclass(frozen=True)
class Metric:
    """A mean over examples.

    >>> OBJECTIVE.of("test"), OBJECTIVE.shown(0.8375)
    ('test_acc', '83.75%')
    """

    name: str  # in the columns
    title: str  # for people
    percent: bool = False
    larger_is_better: bool = False

    def of(self, part: str) -> str:
        """Its column for a part of the data."""
        return f"{part}_{self.name}"

    def shown(self, value: float) -> str:
        return f"{value:.2%}" if self.percent else f"{value:.4f}"

    def better(self, value: float, other: float) -> bool:
        return value > other if self.larger_is_better else value < other

    def reached(self, value: float, target: float) -> bool:
        return value >= target if self.larger_is_better else value <= target

    def best(self, records: Iterable[dict[str, Any]], part: str = "test") -> dict[str, Any] | None:
        """The first of the records with the best value, of those that have one."""
        column, found = self.of(part), None
        for record in records:
            if record.get(column) is not None and (found is None or self.better(record[column], found[column])):
                found = record
        return found


LOSS = Metric("loss", "loss")
OBJECTIVE = Metric("acc", "accuracy", percent=True, larger_is_better=True)
METRICS = (LOSS, OBJECTIVE)  # of the task, in the order of what ``Evaluation`` adds up


def columns_of(*parts: str) -> tuple[str, ...]:
    """What is evaluated on parts of the data."""
    return tuple(metric.of(part) for part in parts for metric in METRICS)


EVALUATED, VALIDATED = columns_of("train", "test"), columns_of("val")
TOTALS = ("bytes_down", "bytes_up", "bytes_mpi", "paper_units")  # of a round in the metrics, of all in the summary
NUMBERS = ("lr", "local_loss", *EVALUATED, "consistency", *TOTALS)

PHASES = ("bcast", "train", "reduce", "server", "eval")
ALL_PHASES = (*PHASES, "total")  # the time of a whole round, also between the phases
TABLES: dict[str, tuple[str, ...]] = {"seconds": ALL_PHASES, "seconds_by_rank": ("train", "wait")}

# Over all clients, with --eval-clients: mean, standard deviation, and mean of the tenth with the lowest objective.
SPREAD = tuple(
    f"client_{OBJECTIVE.of(part)}_{name}" for part in ("test", "train") for name in ("mean", "std", "worst_decile")
)
# Of runs with --diagnose; rounds/watchers/diagnosis.py has the formulas.
DIAGNOSED = (
    *("drift", "drift_ratio", "direction_cosine", "gradient_norm", "gradient_norm_z"),
    *("step_cosine", "step_change"),
)
# Of runs with a validation set, with --eval-clients, and with --diagnose.
OPTIONAL = (*VALIDATED, *SPREAD, *DIAGNOSED)
# In the order in which a record is written; what is not listed follows.
ORDER = (
    *("round", "lr", "participants", "local_loss"),
    *(*EVALUATED, *VALIDATED),
    *("bytes_down", "bytes_up", "paper_units", *TABLES, "consistency", "bytes_mpi"),
    *(*SPREAD, *DIAGNOSED),
    *("nonfinite", "left"),
)


def ordered(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its columns in their order."""
    known = {name: record[name] for name in ORDER if name in record}
    return {**known, **record}
