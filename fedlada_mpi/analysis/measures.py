"""Measures of one run. None: not available (yet); infinity: the run is over and never got there."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..rundir.columns import PARTS, Metric
from .load import RecordedRun

Measure = Callable[[RecordedRun], float | None]


def _first(run: RecordedRun, name: str, level: float, horizon: int | None = None) -> int | None:
    """Index of the first round at or above a level, or below, where smaller is better; -1 when the run ended, or passed
    the horizon, without one."""
    values = run.series[name]
    if horizon is not None:
        values = values[: int(np.searchsorted(run.rounds, horizon, side="right"))]
    more = [m.of(part) for m in run.columns.metrics if m.larger_is_better for part in PARTS]
    reached = values >= level if name in more else values <= level
    if reached.any():
        return int(np.argmax(reached))
    over = run.complete or (horizon is not None and run.done >= horizon)
    return -1 if over and not np.isnan(values).all() else None


def _upto(run: RecordedRun, last: int) -> slice | None:
    """The rounds up to a given one; None when the run has not got that far."""
    if run.done < last:
        return None
    return slice(0, int(np.searchsorted(run.rounds, last, side="right")))


def _last(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known[-1]) if known.size else None


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def rounds_to(name: str, level: float, horizon: int | None = None) -> Measure:
    """The first round up to the horizon in which a metric is at or above a level, or below, where smaller is better."""

    def measure(run: RecordedRun) -> float | None:
        index = _first(run, name, level, horizon)
        return index if index is None else math.inf if index < 0 else float(run.rounds[index])

    return measure


def ratio(below: Measure, above: Measure) -> Measure:
    """One measure over another, where a run has both."""

    def measure(run: RecordedRun) -> float | None:
        under, over = below(run), above(run)
        return None if under is None or over is None or not under or math.isinf(over) else over / under

    return measure


def total_to(name: str, level: float, per_participant: bool = False, horizon: int | None = None) -> Measure:
    """The sum of a quantity until the objective on the test data is reached, up to the horizon."""

    def measure(run: RecordedRun) -> float | None:
        index = _first(run, run.columns.objective.of("test"), level, horizon)
        if index is None or index < 0:
            return None
        amounts = run.series[name][: index + 1]
        if per_participant:
            amounts = amounts / np.maximum(run.series["participants"][: index + 1], 1)
        return float(np.sum(amounts)) if len(amounts) == run.rounds[index] and not np.isnan(amounts).any() else None

    return measure


def test_at(last: int) -> Measure:
    """The objective on the test data after a given round, as people read it: an accuracy in per cent."""

    def measure(run: RecordedRun) -> float | None:
        rounds, objective = _upto(run, last), run.columns.objective
        value = None if rounds is None else _last(run.series[objective.of("test")][rounds])
        return None if value is None else objective.scale * value

    return measure


def test_when_train(level: float) -> Measure:
    """The objective on the test data when that on the training data reaches a level."""

    def measure(run: RecordedRun) -> float | None:
        objective = run.columns.objective
        index = _first(run, objective.of("train"), level)
        if index is None or index < 0:
            return None
        value = run.series[objective.of("test")][index]
        return None if np.isnan(value) else objective.scale * float(value)

    return measure


def best(last: int | None, which: str = "test", by: str = "test", metric: Metric | None = None) -> Measure:
    """A metric (None: the objective) on a part of the data, or ``which="round"`` the round, where the objective on the
    part ``by`` is the best within the first rounds (None: all there are)."""

    def measure(run: RecordedRun) -> float | None:
        rounds, objective = slice(None) if last is None else _upto(run, last), run.columns.objective
        if rounds is None or np.isnan(run.series[objective.of(by)][rounds]).all():
            return None
        values, shown = run.series[objective.of(by)][rounds], metric or objective
        index = int(np.nanargmax(values) if objective.larger_is_better else np.nanargmin(values))
        if which == "round":
            return float(run.rounds[index])
        value = shown.scale * float(run.series[shown.of(which)][index])
        return None if math.isnan(value) else value

    return measure


def final(name: str, scale: float = 1.0) -> Measure:
    """The last known value of a metric."""

    def measure(run: RecordedRun) -> float | None:
        value = _last(run.series[name])
        return None if value is None else scale * value

    return measure


def epsilon(run: RecordedRun) -> float | None:
    """What a private run has spent; rounds without evaluation do not record it."""
    recorded = run.series["epsilon"]
    return float(recorded[-1]) if run.epsilon is None and recorded.size and not np.isnan(recorded[-1]) else run.epsilon


def per_round(*names: str, per_participant: bool = False) -> Measure:
    """The mean over the rounds of a metric, or of the sum of several."""

    def measure(run: RecordedRun) -> float | None:
        amounts = sum(run.series[n] for n in names)
        if per_participant:
            amounts = amounts / np.maximum(run.series["participants"], 1)
        return None if np.isnan(amounts).all() else float(np.nanmean(amounts))

    return measure
