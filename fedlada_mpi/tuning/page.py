"""The page of a search, ``tune.html``: winners with their test results, landscape, course, cost and all trials."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..analysis import drawing, elements
from ..analysis.elements import Section
from ..analysis.groups import Stat, method_names, slugs
from ..analysis.load import RecordedRun, read
from ..analysis.page import assemble, write_tables
from ..analysis.setups import in_words, setting_name
from ..analysis.tables import Cell, Column, Table, duration, plain, size, stat, unit
from ..experiments import PlannedRun
from ..rundir.columns import ACCURACY, Metric
from ..rundir.files import write_atomically
from ..support import disk
from ..support.errors import UserError
from . import figures, results
from .figures import Landscape, Trial
from .plan import MethodSearch, TunePlan
from .search import State
from .strategies import total_rounds

NAME = "tune.html"


class Cost(NamedTuple):
    """What runs have taken."""

    runs: int = 0
    rounds: int = 0
    seconds: float = 0.0
    bytes: float = 0.0

    def plus(self, other: Cost) -> Cost:
        runs, rounds = self.runs + other.runs, self.rounds + other.rounds
        return Cost(runs, rounds, self.seconds + other.seconds, self.bytes + other.bytes)


def write(plan: TunePlan, state: State) -> Path:
    """The page with its tables and figures, of a search that is finished or at work."""
    objective = state.objective or ACCURACY
    runs = _Runs()
    landscapes = [_landscape(plan, search, state, objective, runs) for search in plan.searches]
    costs = _costs(plan, state, runs)
    tables = [_winners(plan, state, objective), _cost_table(plan, costs)]
    trials = [_trials(plan, search, one) for search, one in zip(plan.searches, landscapes, strict=True)]
    path = plan.root / NAME
    with disk.writing(path, "then give the same command again"):
        write_tables([*tables, *trials], plan.root / "tables")
        drawn = drawing.write(figures.plan(landscapes), plan.root / "figures")
    total = Cost()
    for cost in costs.values():
        total = total.plus(cost)
    text = assemble(
        plan.title or plan.name,
        _lead(plan, state, objective),
        _facts(plan, total),
        _sections(plan, state, objective, landscapes, tables, trials, drawn),
        drawing.STYLES["screen"].formats,
    )
    write_atomically(path, text)
    return path


class _Runs:
    """Runs by directory, each read once; None where there is none, or it cannot be read."""

    def __init__(self) -> None:
        self.known: dict[Path, RecordedRun | None] = {}

    def __call__(self, run: PlannedRun) -> RecordedRun | None:
        if run.directory not in self.known:
            try:
                self.known[run.directory] = read(run.directory)
            except UserError:
                self.known[run.directory] = None
        return self.known[run.directory]


def _landscape(plan: TunePlan, search: MethodSearch, state: State, objective: Metric, runs: _Runs) -> Landscape:
    trials = []
    for number, point in enumerate(search.points):
        course = state.course(search.method, number)
        outcomes = [outcome for _, outcome in course if outcome is not None]
        trials.append(Trial(number, point, outcomes, runs(course[-1][0]) if course else None))
    winner = state.winners.get(search.method)
    title, best = method_names(plan.methods)[search.method], winner.trial if winner else None
    slug = slugs(plan.methods)[search.method]
    return Landscape(slug, title, search.space, trials, plan.rungs, best, objective)


def _costs(plan: TunePlan, state: State, runs: _Runs) -> dict[tuple[int, str], Cost]:
    """By stage and method; a trial that goes on has cost on each rung what it did there."""
    costs: dict[tuple[int, str], Cost] = {}
    for at, stage in enumerate(state.stages):
        after = plan.rungs[at - 1].rounds if 0 < at < len(plan.rungs) else 0
        for place, planned in stage:
            cost = _cost(runs(planned), after, planned.rounds)
            costs[at, place.method] = costs.get((at, place.method), Cost()).plus(cost)
    return costs


def _cost(run: RecordedRun | None, after: int, until: int) -> Cost:
    if run is None:
        return Cost()
    there = (run.rounds > after) & (run.rounds <= until)
    sums = (float(np.nansum(run.series[name][there])) for name in ("seconds_total", "bytes_down", "bytes_up"))
    seconds, down, up = sums
    return Cost(1, int(there.sum()), seconds, down + up)


def _lead(plan: TunePlan, state: State, objective: Metric) -> str:
    rungs = ", ".join(f"{rung.trials} to round {rung.rounds}" for rung in plan.rungs)
    each = " of each method" * (len(plan.methods) > 1)
    longer = f"; winners to round {plan.winner_rounds}" * (plan.winner_rounds != plan.rounds)
    mean = f"the mean of its last {plan.mean_of} evaluations" if plan.mean_of > 1 else "after the last round"
    what = (
        f"{plan.strategy.capitalize()} search, trials{each}: {rungs}{longer}. The score is the {objective.title} on "
        f"{plan.validation:.0%} of the training examples, {mean}; the test set has no part in the choice. "
    )
    now = f"{datetime.now():%d %B %Y, %H:%M}"
    return what + (f"Finished; written on {now}." if state.finished else f"At work: as of {now}.")


def _facts(plan: TunePlan, total: Cost) -> list[tuple[str, str]]:
    count = len(plan.methods)
    budget = total_rounds(plan.rungs)
    full = plan.rungs[0].trials * plan.rounds
    facts = [
        (f"{count}", "method" + "s" * (count != 1)),
        (f"{plan.rungs[0].trials * count:,}", "trials"),
        (f"{total.runs:,}", "runs, continued ones too"),
        (f"{total.rounds:,}", "rounds"),
        (duration(Stat((total.seconds,), 1)).text, "of training"),
        (size(Stat((total.bytes,), 1)).text, "sent, down and up"),
    ]
    if budget < full:
        facts.append((f"{budget / full:.0%}", "of the rounds of a full search"))
    return facts


def _sections(
    plan: TunePlan,
    state: State,
    objective: Metric,
    landscapes: Sequence[Landscape],
    tables: Sequence[Table],
    trials: Sequence[Table],
    drawn: Sequence[str],
) -> list[Section]:
    winners, cost = tables
    formats = drawing.STYLES["screen"].formats
    use = "".join(
        f"<p><code>{html.escape(results.command(results.settings_file(plan, method)))}</code></p>"
        for method in state.winners
    )
    shown = []
    for one in landscapes:
        heading = f"<h3>{html.escape(one.title)}</h3>" if len(landscapes) > 1 else ""
        if one.name in drawn:
            alt = f"{one.value_name} of the trials of {one.title} over the settings that were varied"
            shown.append(heading + elements.files(formats, one.name) + elements.picture(one.name, alt))
        else:
            shown.append(heading + elements.note("No trial has a score yet."))
    course = elements.note("No rounds yet.")
    if "trials" in drawn:
        alt = f"{of_words(objective)} of every trial over the rounds"
        course = elements.files(formats, "trials") + elements.picture("trials", alt)
    return [
        Section("winners", "Winner" + "s" * (len(plan.methods) != 1), elements.table(winners) + use),
        Section("landscape", "Landscape", "".join(shown)),
        Section("course", "Trials over the rounds", course),
        Section("cost", "What the search cost", elements.table(cost)),
        Section("trials", "All trials", "".join(map(elements.table, trials))),
    ]


def of_words(objective: Metric) -> str:
    return f"Validation {objective.title}"


def _winners(plan: TunePlan, state: State, objective: Metric) -> Table:
    digits, names = 2 if objective.percent else 4, method_names(plan.methods)
    rows = []
    for search in plan.searches:
        winner = state.winners.get(search.method)
        name = Cell(names[search.method])
        if winner is None:
            state_of = "no trial has a score" if len(state.stages) > len(plan.rungs) else "not known yet"
            rows.append([name, Cell(state_of), *[Cell()] * 4])
            continue
        values = ", ".join(f"{setting_name(n)} {in_words(n, v)}" for n, v in winner.settings.items())
        known = tuple(objective.scale * v for v in winner.tests.values() if not math.isnan(v))
        tested = stat(Stat(known, len(plan.seeds)), digits) if known else Cell()
        seeds = ", ".join(map(str, plan.seeds)) or "none"
        score = plain(objective.scale * winner.score, digits)
        rows.append([name, Cell(values), plain(float(winner.trial), 0), score, tested, Cell(seeds)])
    columns = [
        *(Column("Method", numeric=False), Column("Settings", numeric=False), Column("trial")),
        *(Column(f"validation {objective.title}{unit(objective)}"), Column(f"test {objective.title}{unit(objective)}")),
        Column("seeds", numeric=False),
    ]
    notes = [
        "Test: mean ± standard deviation over new runs with these seeds, after their last round. Seeds are others than "
        "that of the trials, which was a part of the choice; validation examples are held out as in the search.",
        "To train with the settings of a winner:",
    ]
    return Table(
        "winners", f"Best by validation {objective.title}", columns, rows, notes=notes[: 1 + bool(state.winners)]
    )


def _cost_table(plan: TunePlan, costs: dict[tuple[int, str], Cost]) -> Table:
    rows, total, names = [], Cost(), method_names(plan.methods)
    for at in range(plan.stages):
        what = f"rung {at + 1}, to round {plan.rungs[at].rounds}" if at < len(plan.rungs) else "winners' seeds"
        for method in plan.methods:
            cost = costs.get((at, method), Cost())
            total = total.plus(cost)
            rows.append([Cell(what, sort=float(at)), Cell(names[method]), *_cost_cells(cost)])
    rows.append(
        [
            Cell("all", sort=math.inf),
            Cell("all" if len(plan.methods) > 1 else names[plan.methods[0]]),
            *_cost_cells(total),
        ]
    )
    columns = [
        *(Column("Stage", numeric=False), Column("Method", numeric=False), Column("runs"), Column("rounds")),
        *(Column("time"), Column("bytes")),
    ]
    notes = [
        "Rounds and time that were spent on this rung: a trial that goes on keeps the rounds that it has. Time is the "
        "sum over the runs, which may have been at work at once. Bytes: down and up between server and clients."
    ]
    return Table("cost", "By stage", columns, rows, notes=notes)


def _cost_cells(cost: Cost) -> list[Cell]:
    return [
        *(plain(float(cost.runs), 0), plain(float(cost.rounds), 0)),
        *(duration(Stat((cost.seconds,), 1)), size(Stat((cost.bytes,), 1))),
    ]


def _trials(plan: TunePlan, search: MethodSearch, one: Landscape) -> Table:
    digits = 2 if one.objective.percent else 4
    rows = []
    for trial in one.trials:
        cells = [_value(name, trial.point[name]) for name in search.space]
        scores = []
        for at in range(len(plan.rungs)):
            known = trial.course[at] if at < len(trial.course) else None
            if known is None:
                scores.append(Cell())
            elif known.known:
                scores.append(plain(one.objective.scale * known.score, digits))
            else:
                worst = -math.inf if one.objective.larger_is_better else math.inf
                scores.append(Cell(known.state, sort=worst))
        last = max((i for i, cell in enumerate(scores) if cell.value is not None), default=None)
        best = trial.number == one.winner
        if best and last is not None:
            scores[last] = scores[last]._replace(tone="best")
        done = float(trial.run.done) if trial.run else 0.0
        seconds = float(np.nansum(trial.run.series["seconds_total"])) if trial.run else math.nan
        time = duration(Stat((seconds,), 1)) if trial.run else Cell()
        row = [Cell(str(trial.number), sort=float(trial.number)), *cells, *scores, plain(done, 0), time]
        rows.append([*row, Cell("winner" if best else _became(plan, trial))])
    columns = [
        Column("Trial", numeric=False),
        *(Column(setting_name(name)) for name in search.space),
        *(
            Column(f"round {rung.rounds}", f"validation {one.objective.title}{unit(one.objective)}")
            for rung in plan.rungs
        ),
        *(Column("rounds"), Column("time"), Column("", numeric=False)),
    ]
    return Table(f"trials_{one.slug}", one.title, columns, rows)


def _value(name: str, value: object) -> Cell:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return Cell(in_words(name, value), sort=float(value) if number else None)  # type: ignore[arg-type]


def _became(plan: TunePlan, trial: Trial) -> str:
    if not trial.course:
        return ""
    if math.isnan(trial.last):
        return trial.course[-1].state
    return (
        ""
        if len(trial.course) == len(plan.rungs)
        else f"left out after round {plan.rungs[len(trial.course) - 1].rounds}"
    )
