"""Measures of one run. None: not available (yet); infinity: the run is over and never got there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..rundir.client_values import VALUES
from ..rundir.columns import SPREAD
from .load import RecordedRun

Measure = Callable[[RecordedRun], float | None]


def _first(run: RecordedRun, name: str, level: float, horizon: int | None = None, below: bool = False) -> int | None:
    """Index of the first round at or above (``below``: under) a level; -1 when the run ended, or passed the horizon,
    without one."""
    values = run.series[name]
    if horizon is not None:
        values = values[: int(np.searchsorted(run.rounds, horizon, side="right"))]
    reached = values <= level if below else values >= level
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


def evaluated_last(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Those whose clients were evaluated in the latest round in which any of the runs' clients were."""
    known = [(int(run.rounds[~np.isnan(run.series[SPREAD[0]])].max(initial=0)), run) for run in runs if run.clients]
    return [run for at, run in known if at == max(known, key=lambda pair: pair[0])[0]]


def by_silo(runs: Sequence[RecordedRun]) -> dict[str, np.ndarray]:
    """Numbers, clients and images of the silos, and the clients' values by run and silo, weighted by their images.

    So weighted they are those of all images of the silo. Empty where they are not recorded.
    """
    runs = [run for run in evaluated_last(runs) if "silos" in run.clients]
    runs = [run for run in runs if np.array_equal(run.clients["silos"], runs[-1].clients["silos"])]
    if not runs:
        return {}
    silos, place = np.unique(runs[-1].clients["silos"], return_inverse=True)
    images = runs[-1].clients["images"]
    found = {"silos": silos, "clients": np.bincount(place), "images": np.bincount(place, images)}
    for name in VALUES:
        rows = []
        for values in (run.clients[name] for run in runs):
            weights = np.where(np.isfinite(values), images, 0)
            with np.errstate(invalid="ignore", divide="ignore"):
                rows.append(np.bincount(place, weights * np.nan_to_num(values)) / np.bincount(place, weights))
        found[name] = np.array(rows)
    return found


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def rounds_to(name: str, level: float, horizon: int | None = None, below: bool = False) -> Measure:
    """The first round at or above (``below``: under) a level, up to the horizon."""

    def measure(run: RecordedRun) -> float | None:
        index = _first(run, name, level, horizon, below)
        return index if index is None else math.inf if index < 0 else float(run.rounds[index])

    return measure


def total_to(name: str, level: float, per_participant: bool = False, horizon: int | None = None) -> Measure:
    """The sum of a quantity until the test accuracy is reached, up to the horizon."""

    def measure(run: RecordedRun) -> float | None:
        index = _first(run, "test_acc", level, horizon)
        if index is None or index < 0:
            return None
        amounts = run.series[name][: index + 1]
        if per_participant:
            amounts = amounts / np.maximum(run.series["participants"][: index + 1], 1)
        return float(np.sum(amounts)) if len(amounts) == run.rounds[index] and not np.isnan(amounts).any() else None

    return measure


def test_at(last: int) -> Measure:
    """The test accuracy in per cent after a given round."""

    def measure(run: RecordedRun) -> float | None:
        rounds = _upto(run, last)
        return None if rounds is None else percent(_last(run.series["test_acc"][rounds]))

    return measure


def test_when_train(level: float) -> Measure:
    """The test accuracy in per cent when the train accuracy reaches a level."""

    def measure(run: RecordedRun) -> float | None:
        index = _first(run, "train_acc", level)
        if index is None or index < 0:
            return None
        value = run.series["test_acc"][index]
        return None if np.isnan(value) else 100 * float(value)

    return measure


def best(last: int | None, which: str = "test_acc", by: str = "test_acc") -> Measure:
    """An accuracy in per cent, or ``which="round"`` the round, where accuracy ``by`` is the highest within the first
    rounds (None: all there are)."""

    def measure(run: RecordedRun) -> float | None:
        rounds = slice(None) if last is None else _upto(run, last)
        if rounds is None or np.isnan(run.series[by][rounds]).all():
            return None
        index = int(np.nanargmax(run.series[by][rounds]))
        value = float(run.rounds[index]) if which == "round" else 100 * float(run.series[which][index])
        return None if math.isnan(value) else value

    return measure


def final(name: str, scale: float = 1.0) -> Measure:
    """The last known value of a metric."""

    def measure(run: RecordedRun) -> float | None:
        value = _last(run.series[name])
        return None if value is None else scale * value

    return measure


def per_round(*names: str, per_participant: bool = False) -> Measure:
    """The mean over the rounds of a metric, or of the sum of several."""

    def measure(run: RecordedRun) -> float | None:
        amounts = sum(run.series[n] for n in names)
        if per_participant:
            amounts = amounts / np.maximum(run.series["participants"], 1)
        return None if np.isnan(amounts).all() else float(np.nanmean(amounts))

    return measure
