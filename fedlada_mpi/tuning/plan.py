"""The plan of a search, a TOML file:

    title = "..."
    [base]                           # settings of every run; algorithm may be a list of methods
    [base.fedavg]                    # optional: settings of the runs of one method
    [search]                         # settings to vary: a list of values, or a table {low, high, log, int}
    [search.fedlada]                 # optional: further ones of one method
    [tune]                           # strategy, trials, rounds, ... (``KEYS``)

Settings are those of ``python -m fedlada_mpi.run``, checked when the file is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import settings
from ..algorithms import built_in_hypers, settings_of
from ..experiments import PlannedRun, plan_run
from ..settings import SETTINGS
from ..support.code_digest import Files
from ..support.errors import UserError, shortened
from ..support.inputs import check_path
from ..support.suggestions import did_you_mean
from . import strategies
from .space import KEYS as RANGE
from .space import Domain, parse
from .strategies import Rung

FOLDER = Path(__file__).parent / "plans"
SECTIONS = ("title", "base", "search", "tune")
KEYS = (
    *("strategy", "trials", "rounds", "factor", "first_rounds", "mean_of", "validation", "winner_rounds", "seeds"),
    "seed",
)
OF_STRATEGY = {"trials": ("random", "halving"), "factor": ("halving",), "first_rounds": ("halving",)}
# In [base], what [tune] or the search itself decides, and where it belongs.
ELSEWHERE = {
    "rounds": "[tune]",
    "validation": "[tune]",
    "out": "the option --out",
    "eval_test": "nowhere: trials leave the test set alone, and the winner's runs have it once",
}
# Settings that trials must share, or their scores could not be compared.
SHARED = (
    *("dataset", "data_dir", "clients", "partition", "dirichlet", "exhausted", "classes_per_client", "size_sigma"),
    *("partition_seed", "validation", "algorithm", "task", "loss", "metrics", "objective", "seed"),
)
TRIALS, WINNERS = "trials", "winner"  # folders of the runs


@dataclass(frozen=True)
class MethodSearch:
    """The search of one method: what its trials share, what they vary, and the settings of each."""

    method: str
    base: dict[str, Any]
    space: dict[str, Domain]
    points: list[dict[str, Any]]


@dataclass(frozen=True)
class TunePlan:
    """A search, with the runs that it may start."""

    name: str
    title: str
    searches: list[MethodSearch]
    strategy: str
    rungs: list[Rung]
    mean_of: int  # last evaluations, whose mean is the score
    validation: float
    winner_rounds: int
    seeds: list[int]  # of the winners
    root: Path
    content: dict[str, Any]  # what decides the search, as JSON takes it

    @property
    def rounds(self) -> int:
        return self.rungs[-1].rounds

    @property
    def methods(self) -> list[str]:
        return [search.method for search in self.searches]

    @property
    def stages(self) -> int:
        """The rungs, and the winners' runs."""
        return len(self.rungs) + 1

    @cached_property
    def code(self) -> dict[str, Files]:
        """Digests of users' own code by its name; planning a run adds what it names."""
        return {}

    @cached_property
    def _trials(self) -> dict[str, list[PlannedRun]]:
        """By method, each to the end of the search."""
        return {search.method: self._trials_of(search) for search in self.searches}

    def _trials_of(self, search: MethodSearch) -> list[PlannedRun]:
        try:
            return [self._run(search, point, rounds=self.rounds, eval_test="never") for point in search.points]
        except UserError as error:
            raise UserError(f"{search.method}: {error}" if len(self.searches) > 1 else str(error)) from None

    def settings(self, search: MethodSearch, point: Mapping[str, Any]) -> dict[str, Any]:
        """Of a winner with these values, as a user would write them."""
        given = {**search.base, "algorithm": search.method, **point}
        return {**given, "rounds": self.winner_rounds, "validation": self.validation}

    def _run(self, search: MethodSearch, point: Mapping[str, Any], **more: Any) -> PlannedRun:
        given = {"eval_train_every": 0, **self.settings(search, point), **more}
        folder = self.root / (WINNERS if "seed" in more else TRIALS)
        run = plan_run(given, folder, self.code)
        if run.name.values["lr_schedule"] == "cosine" and not given.get("lr_horizon"):
            # That of a trial which goes to the end, on all rungs.
            run = plan_run({**given, "lr_horizon": given["rounds"]}, folder, self.code)
        return replace(run, axes=frozenset(point), directory=folder / run.name.text(point))

    def trial(self, method: str, number: int, rung: int) -> PlannedRun:
        """The run of a trial up to a rung; on the next one it goes on in the same directory."""
        run, rounds = self._trials[method][number], self.rungs[rung].rounds
        return replace(run, rounds=rounds, given={**run.given, "rounds": rounds})

    def winner(self, method: str, number: int) -> list[PlannedRun]:
        """The runs of the trial that has won, with the seeds of the plan, and the test set after the last round."""
        search = next(each for each in self.searches if each.method == method)
        point = search.points[number]
        return [self._run(search, point, seed=seed, eval_test="end") for seed in self.seeds]


def plans() -> list[str]:
    """The names of the plans that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(name: str | os.PathLike[str]) -> Path:
    """The file of a named plan, or the file itself."""
    text = os.fspath(name)
    check_path(text, "the plan")
    path = Path(text)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UserError(f"no file {path}: give a TOML file or one of {', '.join(plans())}")
        return path
    if text not in plans():
        hint = did_you_mean(text, plans())
        raise UserError(f"unknown plan {shortened(text)}{hint}: expected one of {', '.join(plans())}, or FILE.toml")
    return FOLDER / f"{text}.toml"


def load(name: str | os.PathLike[str], out: str = "") -> TunePlan:
    """The plan in a file, or one that comes with the package."""
    path = find(name)
    check_path(out, "--out")
    try:
        return parse_plan(settings.load(path), path.stem, Path(out or Path("runs") / path.stem))
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'--config: {path} ')}") from None


def parse_plan(data: Mapping[str, Any], name: str, root: Path) -> TunePlan:
    """The plan that a file holds."""
    _known(data, SECTIONS, "key")
    tables = {section: data.get(section, {}) for section in SECTIONS[1:]}
    for section, table in tables.items():
        if not isinstance(table, Mapping):
            raise UserError(f"{section}: got {shortened(table)}, expected a table [{section}]")
    base, search, tune = tables["base"], tables["search"], tables["tune"]
    _known(tune, KEYS, "key of [tune]")
    methods = _methods(base)
    strategy = str(tune.get("strategy", "random"))
    if strategy not in strategies.STRATEGIES:
        hint = did_you_mean(strategy, strategies.STRATEGIES)
        raise UserError(
            f"strategy: got {shortened(strategy)}, expected one of {', '.join(strategies.STRATEGIES)}{hint}"
        )
    for key, which in OF_STRATEGY.items():
        if key in tune and strategy not in which:
            raise UserError(f"{key} has no effect on strategy {strategy}, only on {' and '.join(which)}: leave it out")
    rounds, seed = _number(tune, "rounds", 1), _number(tune, "seed", 0, 0)
    trials = 0 if strategy == "grid" else _number(tune, "trials", 1)
    searches = [_search(method, methods, base, search, strategy, trials, seed) for method in methods]
    trials = _same_budget(searches)
    factor = _number(tune, "factor", 2, 3) if strategy == "halving" else 0
    first = _number(tune, "first_rounds", 1, 0) if "first_rounds" in tune else 0
    if first > rounds:
        raise UserError(f"first_rounds: got {first}, expected at most rounds, which is {rounds}")
    found = TunePlan(
        name,
        str(data.get("title", "")),
        searches,
        strategy,
        strategies.rungs(trials, rounds, factor, first),
        _number(tune, "mean_of", 1, 1),
        _validation(tune),
        _number(tune, "winner_rounds", 1, rounds),
        _seeds(tune, base),
        root,
        {"base": dict(base), "search": dict(search), "tune": dict(tune)},
    )
    _check(found)
    return found


def _known(table: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in table:
        if key not in known:
            raise UserError(f"unknown {what} {key!r}{did_you_mean(key, known)}, expected one of {', '.join(known)}")


def _number(table: Mapping[str, Any], key: str, least: int, default: int | None = None) -> int:
    value = table.get(key, default)
    if value is None:
        raise UserError(f"[tune] has no {key}: add {key} = N")
    if type(value) is not int or not least <= value < 2**31:
        raise UserError(f"{key}: got {shortened(value)}, expected an integer, at least {least} and less than 2^31")
    return value


def _validation(tune: Mapping[str, Any]) -> float:
    value = tune.get("validation", 0.1)
    if type(value) not in (int, float) or not 0 < value < 1:
        raise UserError(
            f"validation: got {shortened(value)}, expected a share of the training examples, more than 0 and less than "
            "1: scores are computed on it, as the test set must have no part in the choice"
        )
    return float(value)


def _seeds(tune: Mapping[str, Any], base: Mapping[str, Any]) -> list[int]:
    """Those of the winner: other ones than that of the trials, which was a part of the choice."""
    value, own = tune.get("seeds", 3), settings.chosen("seed", {}, base)
    if type(value) is int and 0 <= value <= 1000:
        return [own + 1 + i for i in range(value)]
    if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value) or len({*value}) < len(value):
        raise UserError(f"seeds: got {shortened(value)}, expected how many, or a list of different ones")
    if own in value:
        raise UserError(f"seeds: got {own}, with which the trials ran, expected others: it was a part of the choice")
    return value


def _methods(base: Mapping[str, Any]) -> list[str]:
    given = base.get("algorithm", SETTINGS["algorithm"].default)
    methods = given if isinstance(given, list) else [given]
    if not methods or not all(isinstance(method, str) for method in methods) or len({*methods}) < len(methods):
        raise UserError(f"algorithm: got {shortened(given)}, expected a method, or a list of different ones")
    for method in methods:
        settings_of(method)  # which refuses one that there is not
    return methods


def _own(table: Mapping[str, Any], section: str, method: str, methods: Sequence[str]) -> dict[str, Any]:
    """What a section has for one method: what is for all, and what is in a table of its name."""
    for name, value in table.items():
        if not isinstance(value, Mapping) or name in methods:
            continue
        if section != "search" or not (name in SETTINGS or name in built_in_hypers() or {*value} & {*RANGE}):
            raise UserError(
                f"[{section}.{name}]: got a table, expected one of a method of this plan{did_you_mean(name, methods)}: "
                f"{', '.join(methods)}"
            )
    shared = {name: value for name, value in table.items() if name not in methods}
    own = table.get(method, {})
    if not isinstance(own, Mapping):
        raise UserError(f"{section}.{method}: got {shortened(own)}, expected a table [{section}.{method}]")
    return {**shared, **own}


def _search(
    method: str,
    methods: Sequence[str],
    base: Mapping[str, Any],
    search: Mapping[str, Any],
    strategy: str,
    trials: int,
    seed: int,
) -> MethodSearch:
    known = settings_of(method)
    fixed = {n: v for n, v in _own(base, "base", method, methods).items() if n != "algorithm"}
    varied = _own(search, "search", method, methods)
    if shared := [name for name in base.get(method, {}) if name in SHARED and name not in ELSEWHERE]:
        raise UserError(f"base.{method}.{shared[0]}: the trials of all methods must share it: put it into [base]")
    if not varied:
        raise UserError("[search] is empty: name at least one setting to vary, such as lr = [0.01, 0.1]")
    for name in (*fixed, *varied):
        if name not in known:
            raise UserError(_unknown(name, method, known))
    for name, value in fixed.items():
        if name in ELSEWHERE:
            raise UserError(f"base.{name} belongs into {ELSEWHERE[name]}")
        if isinstance(value, list) and not known[name].kind.startswith("list"):
            raise UserError(f"base.{name}: got a list, expected one value: settings to vary belong into [search]")
    for name in varied:
        if name in fixed:
            raise UserError(f"{name} is in [base] and in [search]: leave one of them out")
        if name in SHARED or known[name].runtime:
            why = "trials must share it" if name in SHARED else "results do not depend on it"
            raise UserError(f"search.{name} cannot be varied, as {why}: put it into [base]")
    space = {name: parse(name, known[name], value) for name, value in varied.items()}
    return MethodSearch(method, fixed, space, strategies.points(strategy, space, trials, seed))


def _unknown(name: str, method: str, known: Mapping[str, settings.Setting]) -> str:
    if name in built_in_hypers():
        own = ", ".join(n for n in known if n not in SETTINGS) or "none"
        return (
            f"{name} is not a setting of {method} (its own are: {own}): leave it out, or put it into [search.METHOD] "
            "or [base.METHOD] of the method that has it"
        )
    return f"unknown setting {shortened(name)}{did_you_mean(name, known)}"


def _same_budget(searches: Sequence[MethodSearch]) -> int:
    counts = {search.method: len(search.points) for search in searches}
    if len({*counts.values()}) > 1:
        each = ", ".join(f"{method} has {count}" for method, count in counts.items())
        raise UserError(
            f"methods must have the same number of trials, or the comparison is not fair: {each}; give them lists with "
            "as many combinations, or strategy random with trials = N"
        )
    return next(iter(counts.values()))


def _check(plan: TunePlan) -> None:
    """All trials, and the winners' runs, with all settings."""
    for search in plan.searches:
        names = [run.name.text() for run in plan._trials[search.method]]
        for seed in sorted(plan.seeds)[-1:]:  # the largest, which has to be a seed too
            plan._run(search, search.points[0], seed=seed, eval_test="end")
        for number, name in enumerate(names):
            if (first := names.index(name)) < number:
                one, other = search.points[first], search.points[number]
                raise UserError(f"{search.method}: {one} and {other} are the same run: leave one of them out")
