"""How far the runs of a grid are: state, rounds, objective, speed and expected end, from their directories."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..rundir import lock, metrics
from ..rundir.columns import ACCURACY, CLASSIFICATION, Columns, Metric, recorded
from ..rundir.results import finished
from ..support.inputs import read_json
from . import PlannedRun

FINISHED, RUNNING, STOPPED, FAILED, NOT_STARTED = "finished", "running", "stopped", "failed", "not started"
OTHER_CODE = "other code"  # finished, by code that has changed since
WAITING = (STOPPED, NOT_STARTED)
RECENT = 50  # rounds whose mean time is a run's speed
CENTURY = 3.2e9  # seconds; more cannot be expected
HEAD = ("", "run", "state", "rounds", "val", "test", "best", "s/round", "end", "")
SIDES = (">", "<", "<", ">", ">", ">", ">", ">", "<", "<")


@dataclass(frozen=True)
class RunProgress:
    """What a run's directory says about it; None is what is not known yet."""

    name: str
    state: str
    rounds: int  # that it is to have
    done: int = 0
    last: float | None = None  # the objective on the test set in the last evaluated round
    best: float | None = None  # that of the best round: by validation, where there is such a set
    pace: float | None = None  # seconds per round
    holder: str = ""  # who runs it
    validation: float | None = None  # the objective of the best round there
    objective: Metric = ACCURACY

    def seconds_left(self, pace: float | None = None) -> float | None:
        """Until its end; with ``pace``, also where its own is not known."""
        pace = self.pace or pace
        return None if pace is None else min(max(0.0, pace * (self.rounds - self.done)), CENTURY)


def measure(run: PlannedRun) -> RunProgress:
    """The progress of a run."""
    summary, columns = finished(run.directory), columns_of(run.directory)
    objective = columns.objective
    if summary is not None and summary["rounds"] >= run.rounds:
        return _of_summary(run, summary, OTHER_CODE if run.changed() else FINISHED, objective)
    holder = lock.owner(run.directory) or lock.owner(run.directory, lock.GRID) or ""
    try:
        records, _ = metrics.parse(metrics.read(run.directory), columns)
    except OSError:
        records = []
    state = RUNNING if holder else STOPPED if records else NOT_STARTED
    test, validation = objective.of("test"), objective.of("val")
    tested, validated = ([r for r in records if _number(r.get(column)) is not None] for column in (test, validation))
    best = objective.best(validated, "val") or objective.best(tested)
    seconds = [_number((record.get("seconds") or {}).get("total")) for record in records[-RECENT:]]
    timed = [value for value in seconds if value is not None]
    return RunProgress(
        run.directory.name,
        state,
        run.rounds,
        records[-1]["round"] if records else 0,
        tested[-1][test] if tested else None,
        _number(best.get(test)) if best else None,
        fmean(timed) if timed else None,
        holder,
        best[validation] if best and validated else None,
        objective,
    )


def columns_of(directory: Path) -> Columns:
    """The columns of the metrics of the run in ``directory``."""
    try:
        return recorded(read_json(directory / "config.json"))
    except (OSError, ValueError):
        return CLASSIFICATION


def _of_summary(run: PlannedRun, summary: Mapping[str, Any], state: str, objective: Metric) -> RunProgress:
    """Of a finished run, whose summary is much smaller than its metrics."""
    final, best = summary.get("final"), summary.get("best_validation") or summary.get("best")
    seconds, done = _number(summary.get("seconds")), summary["rounds"]
    pace = None if seconds is None or not done else seconds / done
    return RunProgress(
        run.directory.name,
        state,
        run.rounds,
        done,
        _of(final, objective.of("test")),
        _of(best, objective.of("test")),
        pace,
        validation=_of(best, objective.of("val")),
        objective=objective,
    )


def _of(table: Any, column: str) -> float | None:
    """A number in a table of the summary."""
    return _number(table.get(column)) if isinstance(table, dict) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and abs(value) <= metrics.MOST else None


def expected(runs: Sequence[RunProgress], at_once: int) -> float | None:
    """Seconds until the whole grid is finished when ``at_once`` runs are at work; None as long as no speed is known.

    Runs begin in their order, each as soon as one before it ends; one of unknown speed has the mean of the others'.
    """
    paces = [run.pace for run in runs if run.pace]
    if not paces:
        return None
    mean = fmean(paces)
    ends = [run.seconds_left(mean) or 0.0 for run in runs if run.state == RUNNING]
    ends += [0.0] * (at_once - len(ends))
    heapq.heapify(ends)
    for run in runs:
        if run.state in WAITING:
            heapq.heapreplace(ends, ends[0] + (run.seconds_left(mean) or 0.0))
    return max(ends)


def rows(runs: Sequence[RunProgress], now: float, holders: bool = True) -> list[str]:
    """A table, its heading first; ``now`` is in seconds since the epoch."""
    cells = [HEAD, *(_cells(index, run, now, holders) for index, run in enumerate(runs))]
    columns = list(zip(*cells, strict=True))
    # Without a column of validation where there is no such set.
    shown = [i for i, column in enumerate(columns) if HEAD[i] != "val" or any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(f"{row[i]:{SIDES[i]}{widths[i]}}" for i in shown).rstrip() for row in cells]


def _cells(index: int, run: RunProgress, now: float, holders: bool) -> tuple[str, ...]:
    left = run.seconds_left() if run.state == RUNNING else None
    return (
        str(index),
        run.name,
        run.state,
        f"{run.done}/{run.rounds}",
        *("" if value is None else run.objective.shown(value) for value in (run.validation, run.last, run.best)),
        "" if run.pace is None else f"{run.pace:.3g}",
        "" if left is None else clock(now + left, now),
        run.holder if holders else "",
    )


def closing_line(runs: Sequence[RunProgress], now: float, at_once: int = 0) -> str:
    """How many runs are in which state, and when all will be finished.

    ``at_once``: how many will be at work until then, if that is known; otherwise as many as now.
    """
    counts = {state: sum(run.state == state for run in runs) for state in (RUNNING, FAILED, OTHER_CODE)}
    done = sum(run.state == FINISHED for run in runs)
    words = [f"{done} of {len(runs)} runs finished", *(f"{n} {state}" for state, n in counts.items() if n)]
    at_once = at_once or counts[RUNNING]
    if any(run.state in (RUNNING, *WAITING) for run in runs) and (left := expected(runs, max(1, at_once))) is not None:
        end = f"expected end {clock(now + left, now)}, in {duration(left)}"
        words.append(end if at_once else f"about {duration(left)} to go, one run at a time")
    return "; ".join(words)


def clock(moment: float, now: float) -> str:
    """A time of day, with the date where that is another one."""
    then = time.localtime(moment)
    return time.strftime("%H:%M" if then[:3] == time.localtime(now)[:3] else "%d %b %H:%M", then)


def duration(seconds: float) -> str:
    """Seconds in the units that people read."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"
