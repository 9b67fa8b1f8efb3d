"""The columns of metrics.jsonl, by name: what is evaluated, counted, timed and diagnosed.

A metric of the task has a column for each part of the data: ``ACCURACY.of("test")`` is ``test_acc``. The objective of
the task decides which round is the best, and in which round a target is reached. Runs that do not classify have their
metrics in config.json, next to the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..settings.files import COLUMNS

PARTS = ("train", "test", "val")  # of the data, that models are evaluated on


@dataclass(frozen=True)
class Metric:
    """A number that says how good a model is on a part of the data.

    >>> ACCURACY.of("test"), ACCURACY.shown(0.8375)
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
        if self.percent:
            return f"{value:.2%}"
        return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"

    @property
    def scale(self) -> float:
        """From a value to the units in which people read it."""
        return 100.0 if self.percent else 1.0

    def better(self, value: float, other: float) -> bool:
        return value > other if self.larger_is_better else value < other

    def reached(self, value: float, target: float) -> bool:
        return value >= target if self.larger_is_better else value <= target

    def best(self, records: Iterable[dict[str, Any]], part: str = "test") -> dict[str, Any] | None:
        """The first of the records with the best value, of those that have one."""
        column, found = self.of(part), None
        for record in records:
            value = record.get(column)
            if value is not None and value == value and (found is None or self.better(value, found[column])):
                found = record
        return found


LOSS = Metric("loss", "loss")
ACCURACY = Metric("acc", "accuracy", percent=True, larger_is_better=True)

TOTALS = ("bytes_down", "bytes_up", "bytes_mpi", "paper_units")  # of a round in the metrics, of all in the summary
PHASES = ("bcast", "train", "reduce", "server", "eval")
ALL_PHASES = (*PHASES, "total")  # the time of a whole round, also between the phases
TABLES: dict[str, tuple[str, ...]] = {"seconds": ALL_PHASES, "seconds_by_rank": ("train", "wait")}
# Of runs with --diagnose; rounds/watchers/diagnosis.py has the formulas.
DIAGNOSED = (
    *("drift", "drift_ratio", "direction_cosine", "gradient_norm", "gradient_norm_z"),
    *("step_cosine", "step_change"),
)


PROFILED = "profiled"  # true in rounds of --profile, whose seconds are not those of others
PRIVATE = ("epsilon", "clip_norm", "within_clip")  # of runs with --dp


@dataclass(frozen=True)
class Columns:
    """The columns of a task: ``metrics`` has the loss first, ``objective`` is one of them.

    >>> CLASSIFICATION.evaluated
    ('train_loss', 'train_acc', 'test_loss', 'test_acc')
    """

    metrics: tuple[Metric, ...]
    objective: Metric

    def of(self, *parts: str) -> tuple[str, ...]:
        """What is evaluated on parts of the data."""
        return tuple(metric.of(part) for part in parts for metric in self.metrics)

    @cached_property
    def evaluated(self) -> tuple[str, ...]:
        return self.of("train", "test")

    @cached_property
    def validated(self) -> tuple[str, ...]:
        return self.of("val")

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """That every record has, if only as null."""
        return ("lr", "local_loss", *self.evaluated, "consistency", *TOTALS)

    @cached_property
    def spread(self) -> dict[str, tuple[str, str, str]]:
        """Over all clients, with --eval-clients, by part of the data: mean, standard deviation, and mean of the worst
        tenth of the objective."""
        return {
            part: (f"client_{name}_mean", f"client_{name}_std", f"client_{name}_worst_decile")
            for part in ("test", "train")
            for name in (self.objective.of(part),)
        }

    @cached_property
    def optional(self) -> tuple[str, ...]:
        """Of runs with a validation set, with --eval-clients, with --diagnose, and with --dp."""
        return (*self.validated, *self.spread["test"], *self.spread["train"], *DIAGNOSED, *PRIVATE)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """In which a record is written; what is not listed follows."""
        return (
            *("round", "lr", "participants", "local_loss"),
            *(*self.evaluated, *self.validated),
            *("bytes_down", "bytes_up", "paper_units", *TABLES, "consistency", "bytes_mpi"),
            *(*self.spread["test"], *self.spread["train"], *DIAGNOSED),
            *PRIVATE,
            *("nonfinite", "out_of_range", "left", "void", PROFILED),
        )

    def ordered(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record with its columns in their order."""
        known = {name: record[name] for name in self.order if name in record}
        return {**known, **record}

    def record(self) -> dict[str, Any]:
        """For config.json; nothing where the task is classification."""
        if self == CLASSIFICATION:
            return {}
        return {"objective": self.objective.name, "metrics": [asdict(metric) for metric in self.metrics]}


CLASSIFICATION = Columns((LOSS, ACCURACY), ACCURACY)


def of_task(metrics: Mapping[str, tuple[str, bool, bool]], objective: str, larger_is_better: bool) -> Columns:
    """Of a task with these metrics, by name their title, whether they are shares, and whether more is better."""
    named = {LOSS.name: LOSS}
    for name, (title, percent, more) in metrics.items():
        named[name] = Metric(name, title or name, percent, larger_is_better if name == objective else more)
    return Columns(tuple(named.values()), named[objective])


def recorded(record: Any) -> Columns:
    """The columns of a run from its config.json, in which ``COLUMNS`` is what ``Columns.record`` gave."""
    stored = record.get(COLUMNS) if isinstance(record, Mapping) else None
    if not stored:
        return CLASSIFICATION
    try:
        metrics = tuple(Metric(str(m["name"]), str(m["title"]), *_flags(m)) for m in stored["metrics"])
        names = [metric.name for metric in metrics]
        if names[0] != LOSS.name or len({*names}) < len(names) or not all(map(str.isidentifier, names)):
            raise ValueError
        return Columns(metrics, metrics[names.index(stored["objective"])])
    except (TypeError, ValueError, LookupError):
        raise ValueError(f"its {COLUMNS!r} are not those of a run") from None


def _flags(metric: Mapping[str, Any]) -> tuple[bool, bool]:
    return bool(metric["percent"]), bool(metric["larger_is_better"])
