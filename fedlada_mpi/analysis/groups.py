"""Groups of runs that differ only in their seed: mean and standard deviation of curves and of measures."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import algorithms, settings
from ..algorithms import resolve
from ..rundir.columns import ACCURACY, Columns, Metric
from .load import DIVERGED, RecordedRun

DATASET_NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tinyimagenet": "TinyImageNet", "digits": "Digits"}
SYMBOLS = {"alpha": "α", "mu": "μ", "lr": "η_l", "server_lr": "η_g", "weight_decay": "λ", "beta1": "β₁", "beta2": "β₂"}
# Settings of the learning task, as opposed to the method.
PROBLEM = (
    *("dataset", "task", "loss", "metrics", "objective"),
    *("model", "norm", "activation", "smu_mu", "init", "init_partial"),
    *("clients", "partition", "dirichlet", "exhausted", "partition_seed", "validation"),
)
# Settings whose values need no name.
PLAIN = ("preset", "task", "loss", "model", "activation", "precision", "partition", "sampling")
# Settings by which data is made: the same ones may still have been used for other data.
OF_DATA = (
    *("dataset", "clients", "partition", "dirichlet", "exhausted", "classes_per_client", "size_sigma"),
    *("partition_seed", "validation"),
)
EVALUATED = ("test", "train", "val")  # parts of the data, on which some rounds are evaluated and others not


def kind(dataset: str) -> str:
    """The known data set of that name, also where the setting is a directory of its shards."""
    return dataset if dataset in settings.PRESETS else Path(dataset).name or dataset


class Curve(NamedTuple):
    """A metric over the rounds that have a value: its mean and standard deviation (NaN for one run)."""

    rounds: np.ndarray
    mean: np.ndarray
    std: np.ndarray


@cache
def _preset(dataset: str, method: str, preset: str = "paper") -> dict[str, Any]:
    """The values of the paper's preset, or of another one; of a user's own method only those of the data set."""
    dataset = dataset if dataset in settings.PRESETS else "other"
    known = {"dataset": dataset, "algorithm": method if method in algorithms.names() else "fedavg"}
    return {**resolve({**known, "preset": preset}).config.record(), "preset": "paper"}


def identity(values: Mapping[str, Any]) -> list[str]:
    """The names of the settings on which a result depends, but for the seed, over which we average."""
    runtime = {n for n, setting in settings.SETTINGS.items() if setting.runtime}
    return [n for n in values if n != "seed" and n not in runtime]


@dataclass(frozen=True)
class Stat:
    """A number over seeds: its values, of how many runs, and, where runs never got there, after how many rounds."""

    values: tuple[float, ...] = ()
    of: int = 0
    beyond: int | None = None

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def complete(self) -> bool:
        """Whether every run has a value."""
        return len(self.values) == self.of

    @property
    def std(self) -> float | None:
        """Sample standard deviation; a single run has none."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None


@dataclass
class Group:
    """Runs with the same settings, code and metrics, and different seeds."""

    settings: dict[str, Any]
    runs: list[RecordedRun]
    repeated: int = 0
    data: str = ""  # which one, where others of these runs have the same settings of the data and other data
    _curves: dict[str, Curve] = field(default_factory=dict)

    @property
    def dataset(self) -> str:
        return kind(self.settings["dataset"])

    @property
    def method(self) -> str:
        return self.settings["algorithm"]

    @property
    def method_name(self) -> str:
        recorded = next((run.method for run in self.runs if run.method), "")
        return recorded if recorded and self.method not in algorithms.names() else method_name(self.method)

    @property
    def code(self) -> str:
        """Of a user's own method and model, the same in all runs: two of one name may be two methods."""
        return self.runs[0].code

    @property
    def columns(self) -> Columns:
        """Those of the task's metrics."""
        return self.runs[0].columns

    @property
    def diverged(self) -> int:
        """How many of its runs did."""
        return sum(run.status == DIVERGED for run in self.runs)

    @property
    def validated(self) -> bool:
        """Whether validation data chooses the best round."""
        return self.has(self.columns.objective.of("val"))

    @property
    def done(self) -> int:
        return max(run.done for run in self.runs)

    @property
    def problem(self) -> str:
        """The data set and, where they differ from its presets, the model and the partition."""
        own, which = self.departures(), [self.data] if self.data else []
        return ", ".join([dataset_name(self.dataset), *(show(n, own[n]) for n in PROBLEM if n in own), *which])

    @property
    def named(self) -> set[str]:
        """Settings that were given by name, see ``RecordedRun``."""
        return {name for run in self.runs for name in run.named}

    def departures(self) -> dict[str, Any]:
        """Settings that differ from the run's preset of the data set and the method; the preset, if not the paper's.

        The defaults of a user's own method are not known here: of its settings, those that were given.
        """
        preset, named = _preset(self.dataset, self.method, self.settings["preset"]), self.named
        return {
            n: v
            for n, v in self.settings.items()
            if n not in ("dataset", "algorithm") and (v != preset[n] if n in preset else n in named)
        }

    def curve(self, name: str) -> Curve:
        """A metric over the rounds in which all runs that have it at all have it."""
        if name not in self._curves:
            known = [
                (run.rounds[there], run.series[name][there]) for run in self.runs if (there := _there(run, name)).any()
            ]
            rounds = reduce(np.intersect1d, (at for at, _ in known)) if known else np.empty(0, np.int64)
            table = np.array([values[np.isin(at, rounds)] for at, values in known]).reshape(len(known), len(rounds))
            mean = table.sum(axis=0) / max(1, len(known))
            std = table.std(axis=0, ddof=1) if len(known) > 1 else np.full(len(rounds), np.nan)
            self._curves[name] = Curve(rounds, mean, std)
        return self._curves[name]

    def has(self, name: str) -> bool:
        """Whether there are rounds in which all runs that have the metric at all have it."""
        return len(self.curve(name).rounds) > 0

    @cached_property
    def aligned(self) -> list[RecordedRun]:
        """The runs, each metric only where every run that got so far has it: evaluated in the same rounds."""
        return _aligned(self.runs, cut=False)

    @cached_property
    def common(self) -> list[RecordedRun]:
        """The runs, each metric only in the rounds that all runs with any value of it have."""
        return _aligned(self.runs, cut=True)

    def over(self, measure: Callable[[RecordedRun], float | None], horizon: int | None = None) -> Stat:
        """A measure of a certain round or level, over the runs that have it; an infinite one means that the run is
        over, or past the horizon, and never got there."""
        return self._stat([measure(run) for run in self.aligned], horizon)

    def latest(self, measure: Callable[[RecordedRun], float | None]) -> Stat:
        """A measure of all rounds, or of the last one, over the rounds that all runs have."""
        return self._stat([measure(run) for run in self.common], None)

    def each(self, measure: Callable[[RecordedRun], float | None]) -> Stat:
        """A measure of every run as far as it got."""
        return self._stat([measure(run) for run in self.runs], None)

    @cached_property
    def uneven(self) -> str:
        """What its means leave out, where seeds differ in their rounds or in those that were evaluated; else empty."""
        lengths = sorted({run.done for run in self.runs if run.done})
        if not lengths:
            return ""
        names = [self.columns.objective.of(part) for part in EVALUATED]
        last = max((int(self.curve(name).rounds[-1]) for name in names if self.has(name)), default=lengths[0])
        differ = [f"seeds have {lengths[0]:,} to {lengths[-1]:,} rounds"] if len(lengths) > 1 else []
        for name in names:
            steps = {at[at <= lengths[0]].tobytes() for run in self.runs if len(at := run.rounds[_there(run, name)])}
            if len(steps) > 1:
                differ.append("seeds were evaluated in different rounds")
                break
        return f"{', and '.join(differ)}: means over the rounds that all have, up to {last:,}" if differ else ""

    def _stat(self, measured: Sequence[float | None], horizon: int | None) -> Stat:
        values = tuple(v for v in measured if v is not None and math.isfinite(v))
        last = [run.done if horizon is None else min(run.done, horizon) for run in self.runs]
        never = [done for done, v in zip(last, measured, strict=True) if v is not None and math.isinf(v)]
        return Stat(values, len(self.runs), min(never) if never else None)


def _there(run: RecordedRun, name: str) -> np.ndarray:
    """In which of its rounds the run has a value of the metric."""
    return ~np.isnan(run.series[name])


def _aligned(runs: Sequence[RecordedRun], cut: bool) -> list[RecordedRun]:
    """The runs without the values that others lack; with ``cut`` also without those after the end of the others."""
    series = [dict(run.series) for run in runs]
    for name in runs[0].series:
        evaluated = [run.rounds[_there(run, name)] for run in runs]
        others = [(run.done, at) for run, at in zip(runs, evaluated, strict=True) if len(at)]
        if all(np.array_equal(at, others[0][1]) for _, at in others):
            continue
        for own, run in zip(series, runs, strict=True):
            shared = _there(run, name)
            for done, at in others:
                shared &= np.isin(run.rounds, at) | (not cut and run.rounds > done)
            own[name] = np.where(shared, run.series[name], np.nan)
    return [replace(run, series=own) for run, own in zip(runs, series, strict=True)]


def uneven(groups: Sequence[Group]) -> list[str]:
    """Notes on the groups whose seeds differ in their rounds or in those that were evaluated, alike ones in one."""
    alike: dict[str, list[str]] = {}
    for one, name in zip(groups, labels(groups), strict=True):
        if one.uneven:
            alike.setdefault(one.uneven, []).append(name)
    return [f"{', '.join(names)}: {why}." for why, names in alike.items()]


def group(runs: Iterable[RecordedRun]) -> list[Group]:
    """Groups, ordered by data set, method and settings. Of two runs with the same seed the longer one counts."""
    by_identity: dict[tuple, dict[int, RecordedRun]] = {}
    repeated: dict[tuple, int] = {}
    runs = list(runs)
    for run, data in zip(runs, _which_data(runs), strict=True):
        values = {**run.settings, "dataset": kind(run.settings["dataset"])}
        key: tuple[Any, ...] = (*((n, values[n]) for n in identity(values)), run.code, run.columns, data)
        seeds = by_identity.setdefault(key, {})
        repeated[key] = repeated.get(key, 0) + (run.seed in seeds)
        if run.seed not in seeds or run.done > seeds[run.seed].done:
            seeds[run.seed] = run
    groups = []
    for key, seeds in by_identity.items():
        members = [seeds[s] for s in sorted(seeds)]
        first = members[0].settings
        groups.append(Group({n: first[n] for n in identity(first)}, members, repeated[key], key[-1]))
    return sorted(groups, key=_order)


def _which_data(runs: Sequence[RecordedRun]) -> list[str]:
    """Of each run, which data it was trained on, where runs with the same settings of the data have several."""
    settings_of = [(kind(run.settings["dataset"]), *(run.settings[n] for n in OF_DATA[1:])) for run in runs]
    known: dict[tuple, set[str]] = {}
    for values, run in zip(settings_of, runs, strict=True):
        known.setdefault(values, set()).update([run.data] if run.data else [])
    return [
        (f"data {run.data}" if run.data else "data not recorded") if len(known[values]) > 1 else ""
        for values, run in zip(settings_of, runs, strict=True)
    ]


def _order(one: Group) -> tuple:
    datasets, methods = list(settings.PRESETS), list(algorithms.names())
    return (
        datasets.index(one.dataset) if one.dataset in datasets else len(datasets),
        one.dataset,
        one.problem,
        _kind_of_task(one),
        methods.index(one.method) if one.method in methods else len(methods),
        one.method,
        [_sortable(value) for value in one.settings.values()],
        one.code,
    )


def _kind_of_task(one: Group) -> tuple:
    """Groups of one objective, and of the same metrics, follow each other."""
    objective = one.columns.objective
    return (objective != ACCURACY, objective.name, *(metric.name for metric in one.columns.metrics))


def _sortable(value: Any) -> tuple:
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))


def show(name: str, value: Any) -> str:
    """A setting as text, such as α=0.1."""
    if isinstance(value, str) and name in PLAIN:
        return value
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{SYMBOLS.get(name, name.replace('_', ' '))}={text}"


def method_name(method: str) -> str:
    """As in the method's paper; a user's own by the name of its class."""
    return algorithms.find(method).title() if method in algorithms.names() else method.rpartition(":")[2]


def method_names(methods: Sequence[str]) -> dict[str, str]:
    """The names of several methods; where they share one, each with its file or module."""
    names = {method: method_name(method) for method in methods}
    count = Counter(names.values())
    return {m: f"{name} ({_place(m)})" if count[name] > 1 else name for m, name in names.items()}


def dataset_name(dataset: str) -> str:
    return DATASET_NAMES.get(dataset, dataset)


def labels(groups: Sequence[Group]) -> list[str]:
    """A short name for each of these groups: the method, and the settings that distinguish it from the others.

    An axis of a plan is one of them also where its value is the preset's.
    """
    departures = [one.departures() for one in groups]
    shared = (
        {n for n, v in groups[0].settings.items() if all(g.settings.get(n) == v for g in groups)} if groups else set()
    )
    names = []
    for one, own in zip(groups, departures, strict=True):
        same_method = [g for g in groups if g.method == one.method and g.dataset == one.dataset]
        varied = {
            n
            for n, v in one.settings.items()
            if n != "dataset" and any(g.settings.get(n, MISSING) != v for g in same_method)
        }
        shown = varied if len(varied) == 1 else set(own) - shared
        shown |= one.named - own.keys() - shared
        shown |= varied - _preset(one.dataset, one.method).keys()
        names.append(" ".join([one.method_name, *(show(n, v) for n, v in one.settings.items() if n in shown)]))
    return _told_apart(_told_apart(names, groups, lambda one: _place(one.method)), groups, _code)


def _told_apart(names: Sequence[str], groups: Sequence[Group], mark: Callable[[Group], str]) -> list[str]:
    """The names; those that groups of one problem share with the mark of each, where their marks differ."""
    alike: dict[tuple[str, str], set[str]] = {}
    for one, name in zip(groups, names, strict=True):
        alike.setdefault((one.problem, name), set()).add(mark(one))
    return [
        f"{name} ({mark(one)})" if len(alike[one.problem, name]) > 1 else name
        for one, name in zip(groups, names, strict=True)
    ]


def _place(method: str) -> str:
    """The file or module of a user's own method."""
    return method.rpartition(":")[0] or "built-in"


def _code(one: Group) -> str:
    return f"code {one.code}" if one.code else "code not recorded"


def by_problem(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each problem; where tasks differ in more than their settings, as with a user's own metrics, they
    are told apart by their objectives."""
    metrics_of: dict[str, dict[Columns, str]] = {}
    for one in groups:
        known = metrics_of.setdefault(one.problem, {})
        title = one.columns.objective.title
        known.setdefault(one.columns, f"{title}, {len(known) + 1}" if title in known.values() else title)
    problems: dict[str, list[Group]] = {}
    for one in groups:
        known = metrics_of[one.problem]
        name = f"{one.problem} ({known[one.columns]})" if len(known) > 1 else one.problem
        problems.setdefault(name, []).append(one)
    return problems


def by_objective(groups: Sequence[Group]) -> dict[Metric, list[Group]]:
    """The groups of each objective: values of different ones are not compared."""
    objectives: dict[Metric, list[Group]] = {}
    for one in groups:
        objectives.setdefault(one.columns.objective, []).append(one)
    return objectives


def slug(name: str) -> str:
    """A file name for a title; a long one is cut, and told apart by a hash."""
    text = "_".join("".join(c if c.isalnum() or c == "." else " " for c in name.lower()).split())
    return text if len(text) <= 60 else f"{text[:50]}_{_hash(text)}"


def slugs(names: Iterable[str]) -> dict[str, str]:
    """A file name for each title; those whose letters and digits are the same are told apart by a hash."""
    known = {name: slug(name) for name in names}
    count = Counter(known.values())
    return {name: short if count[short] == 1 else f"{short}_{_hash(name)}" for name, short in known.items()}


def problems(groups: Sequence[Group]) -> Iterator[tuple[str, str, list[Group]]]:
    """Each problem, its part of the names of files, and its groups."""
    known = by_problem(groups)
    for problem, name in slugs(known).items():
        yield problem, name, known[problem]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
