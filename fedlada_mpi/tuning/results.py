"""What a search leaves: a file of settings for each winner, and the table of its trials."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.groups import slugs
from ..experiments import PlannedRun, progress
from ..rundir.columns import ACCURACY, Metric
from ..rundir.files import write_atomically
from .outcomes import FAILED, Outcome
from .plan import TunePlan
from .search import State, Winner


def settings_file(plan: TunePlan, method: str) -> Path:
    """Where the winner's settings are: ``tuned.toml``, or of several methods one file each."""
    return plan.root / ("tuned.toml" if len(plan.methods) == 1 else f"tuned-{slugs(plan.methods)[method]}.toml")


def command(path: Path) -> str:
    """What starts a run with the winner's settings."""
    return f"python -m fedlada_mpi.run --config {shlex.quote(str(path))}"


def write_settings(plan: TunePlan, state: State) -> list[Path]:
    """The winners' settings, once these are known."""
    written = []
    for search in plan.searches:
        winner = state.winners.get(search.method)
        if winner is not None:
            path = settings_file(plan, search.method)
            write_atomically(path, toml(plan.settings(search, winner.settings), _remarks(plan, winner, state)))
            written.append(path)
    return written


def _remarks(plan: TunePlan, winner: Winner, state: State) -> list[str]:
    objective = state.objective or ACCURACY
    count = plan.rungs[0].trials
    return [
        f"{winner.method}: the best of {count} trial{'s' * (count != 1)} by {plan.strategy} search, validation "
        f"{objective.title} {objective.shown(winner.score)}.",
        *([tested(winner, objective) + "."] if winner.tests else []),
        f"{plan.validation:g} of the training examples are held out, as in the search; validation = 0 trains on all.",
    ]


def tested(winner: Winner, objective: Metric) -> str:
    """The test result of a winner in words."""
    known = sum(not math.isnan(value) for value in winner.tests.values())
    if not known:
        return f"test {objective.title}: no seed has one"
    spread = "" if math.isnan(winner.std) else f" ± {objective.shown(winner.std)}"
    of = f"{known} seed{'s' * (known != 1)}" if known == len(winner.tests) else f"{known} of {len(winner.tests)} seeds"
    return f"test {objective.title} {objective.shown(winner.mean)}{spread}, {of}"


def toml(values: Mapping[str, Any], remarks: Sequence[str] = ()) -> str:
    """Settings as TOML; JSON writes numbers, lists and unescaped texts as TOML does."""
    lines = [f"# {remark}" for remark in remarks]
    lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def closing_lines(plan: TunePlan, state: State) -> list[str]:
    """What a search prints at its end."""
    objective, lines = state.objective or ACCURACY, []
    for method in plan.methods:
        winner = state.winners.get(method)
        if winner is None:
            lines.append(f"{method}: no trial has a score, all have diverged or failed: widen or move [search]")
            continue
        point = ", ".join(f"{name} {shown(value)}" for name, value in winner.settings.items())
        lines.append(f"{method}: {point}; validation {objective.title} {objective.shown(winner.score)}")
        if winner.tests:
            lines.append(f"  {tested(winner, objective)}")
        lines.append(f"  {command(settings_file(plan, method))}")
    # Such as for want of memory: the choice is among fewer than the plan has.
    if failed := sum(outcome.state == FAILED for outcome in state.outcomes.values()):
        runs = f"{failed} run{'s' * (failed != 1)}"
        lines.append(f"{runs} failed, not by diverging: see log.txt of each; --retry-failed starts them again")
    return lines


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def status_rows(plan: TunePlan, state: State) -> list[str]:
    """A table of each method's trials, and of its winner's seeds: values, rounds, scores, and what became of them."""
    objective, rows = state.objective or ACCURACY, []
    for search in plan.searches:
        rows.append([search.method, *search.space, "rounds", *(f"round {rung.rounds}" for rung in plan.rungs)])
        winner = state.winners.get(search.method)
        for number, point in enumerate(search.points):
            course = state.course(search.method, number)
            cells = [_cell(run, outcome, objective) for run, outcome in course]
            best = "winner" if winner and winner.trial == number else ""
            cells = [*cells, *[""] * (len(plan.rungs) - len(cells)), best]
            done = f"{course[-1][0].rounds_done()}/{course[-1][0].rounds}" if course else ""
            rows.append([str(number), *(shown(value) for value in point.values()), done, *cells])
        for seed, run, outcome in state.seeds(search.method):
            cells = [*[""] * (len(plan.rungs) - 1), _cell(run, outcome, objective), f"test, seed {seed}"]
            rows.append(["", *[""] * len(search.space), f"{run.rounds_done()}/{run.rounds}", *cells])
        rows.append([])
    return _aligned(rows[:-1])


def _cell(run: PlannedRun, outcome: Outcome | None, objective: Metric) -> str:
    if outcome is None:
        return progress.measure(run).state
    return objective.shown(outcome.score) if outcome.known else outcome.state


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    width = max(map(len, rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(width)]
    return ["  ".join(f"{cell:<{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in rows]
