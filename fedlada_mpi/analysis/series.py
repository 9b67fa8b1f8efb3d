"""Curves, whatever draws them: their names, colours, dashes and markers, and their points with a band.

``drawing.py`` draws them by matplotlib, ``page.py`` passes them on to Plotly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import NamedTuple

import numpy as np

from .. import algorithms
from ..rundir.columns import CLASSIFICATION, LOSS, PHASES, Columns, Metric
from .groups import Group, labels
from .sites import by_name, by_silo


class Quantity(NamedTuple):
    """What an axis shows."""

    title: str
    percent: bool = False

    @property
    def within(self) -> str:
        """The title within a sentence."""
        return self.title[:1].lower() + self.title[1:]


TRAINED = {
    "consistency": Quantity("Consistency  mean ‖x_i − x‖²"),
    "local_loss": Quantity("Local loss"),
    "drift": Quantity("Client drift  mean ‖x_i − xᵗ‖²"),
    "drift_ratio": Quantity("Client drift / squared global step"),
    "direction_cosine": Quantity("Cosine of g_a and the true gradient"),
    "gradient_norm": Quantity("True gradient ‖∇F(xᵗ)‖"),
    "gradient_norm_z": Quantity("True gradient ‖∇F(zᵗ)‖"),
    "step_cosine": Quantity("Cosine of successive global steps"),
    "step_change": Quantity("Squared change of the step / squared step"),
    "epsilon": Quantity("Epsilon of the clients' privacy"),
    "clip_norm": Quantity("Clip of what a client sends"),
}
PART_NAMES = {"test": "Test", "train": "Train", "val": "Validation"}
SPREAD_NAMES = ("mean", "standard deviation", "worst tenth")


@cache
def quantities(columns: Columns = CLASSIFICATION) -> dict[str, Quantity]:
    """What curves may show of a task, by column, in the order in which it is offered: the objective comes first."""
    objective, loss = columns.objective, columns.metrics[0]
    others = [metric for metric in columns.metrics if metric not in (objective, loss)]
    evaluated = [(objective, "test"), (loss, "train"), (objective, "train"), (loss, "test")]
    evaluated += [(metric, part) for metric in others for part in ("test", "train")]
    validated = [(metric, "val") for metric in (objective, loss, *others)]
    return {
        **{metric.of(part): of_part(metric, part) for metric, part in evaluated},
        **TRAINED,
        **{metric.of(part): of_part(metric, part) for metric, part in validated},
        **{
            column: _quantity(f"Clients' {part} {objective.title}, {name}", objective)
            for part in ("test", "train")
            for column, name in zip(columns.spread[part], SPREAD_NAMES, strict=True)
        },
    }


def of_part(metric: Metric, part: str) -> Quantity:
    """A metric on a part of the data."""
    name = "Training" if metric == LOSS and part == "train" else PART_NAMES[part]
    return _quantity(f"{name} {metric.title}", metric)


def _quantity(title: str, metric: Metric) -> Quantity:
    return Quantity(title + " (%)" * metric.percent, metric.percent)


LOGARITHMIC = ("consistency", "drift", "drift_ratio", "gradient_norm", "gradient_norm_z", "step_change")
SPENT = ("units", "bytes", "seconds")  # what curves are drawn against, besides rounds
PHASE_COLOURS = ("#33a9dd", "#d9400f", "#0077bb", "#e6a700", "#7f8791")
MOST_NAMED = 50  # clients with a row each
ONE_PANEL = 10  # groups; more cannot be distinguished in one panel


def with_silos(groups: Sequence[Group]) -> list[Group]:
    """Those whose values are known silo by silo; none where they are too many to show."""
    known = [one for one in groups if len(by_silo(one.runs) or ()) > 1]
    return known if len(known) <= ONE_PANEL else []


def with_names(groups: Sequence[Group]) -> list[Group]:
    """Those whose values are known client by client and by name, of few clients, some of which share a silo; none
    where the groups are too many to show."""
    known = []
    for one in groups:
        silos, clients = by_silo(one.runs), by_name(one.runs)
        if clients is not None and len(silos or ()) < len(clients) <= MOST_NAMED:
            known.append(one)
    return known if len(known) <= ONE_PANEL else []


class Look(NamedTuple):
    """How a group is drawn."""

    colour: str  # on white
    dark: str  # on black
    dash: tuple[float, ...]  # strokes and gaps, in widths of the line; empty: solid
    marker: str  # one of MARKERS


# By matplotlib's name, Plotly's.
MARKERS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "p": "pentagon",
    "*": "star",
}
DASHES = ((), (5.0, 2.0), (1.5, 1.5), (6.0, 1.6, 1.5, 1.6))
# Colours are apart by 0.09 in OKLab, on white and on black, for readers with normal sight and with each kind of colour
# blindness; two with the same dash are apart in lightness, for print in grey. Neighbours are the most unlike.
_FIRST = (
    Look("#f05a4b", "#e53228", DASHES[0], "o"),
    Look("#0f00a5", "#c6d7fe", DASHES[3], "s"),
    Look("#0fa587", "#0e9b7f", DASHES[2], "^"),
    Look("#c34bff", "#bb1cfd", DASHES[1], "D"),
    Look("#875a00", "#d59d47", DASHES[0], "v"),
    Look("#0078b4", "#2fa7f0", DASHES[3], "P"),
    Look("#5a5a5a", "#b2b2b2", DASHES[1], "p"),
    Look("#4b2d0f", "#facea8", DASHES[2], "*"),
)


def _again(look: Look, times: int) -> Look:
    """The colour for another group, with another dash and another marker."""
    marks = list(MARKERS)
    dash = DASHES[(DASHES.index(look.dash) + times) % len(DASHES)]
    return look._replace(dash=dash, marker=marks[(marks.index(look.marker) + 3 * times) % len(marks)])


LOOKS = tuple(_again(look, times) for times in range(len(DASHES)) for look in _FIRST)


def looks(groups: Sequence[Group]) -> list[Look]:
    """A look for each group: a method's own, where it has one and comes once; else the next that is free."""
    methods = [one.method for one in groups]
    own = {m: look for m in methods if methods.count(m) == 1 and (look := _own(m))}
    free = (look for look in cycle(LOOKS) if look not in own.values() or len(groups) > len(LOOKS))
    return [own.get(method) or next(free) for method in methods]


def sequence(count: int) -> list[Look]:
    """Looks of an ordered set."""
    return [LOOKS[i % len(LOOKS)] for i in range(count)]


def _own(method: str) -> Look | None:
    colour = algorithms.find(method).colour if method in algorithms.names() else ""
    return next((look for look in LOOKS if look.colour == colour), None)


def thinned(count: int, points: int) -> np.ndarray:
    """Indices of at most so many of the points, evenly spaced, with the first and the last; none is interpolated."""
    if count <= points:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, points).round().astype(int))


def scale(measure: str, columns: Columns = CLASSIFICATION) -> float:
    """From the values of a measure to the units of its axis."""
    return 100.0 if quantities(columns)[measure].percent else 1.0


class Points(NamedTuple):
    """The points of a curve, in the units of its axis."""

    rounds: np.ndarray
    y: np.ndarray
    std: np.ndarray | None  # the band is y ± std; None of a single run


def points(one: Group, measure: str, most: int, limit: int | None = None) -> Points:
    """At most so many points of a group's curve, up to the round ``limit``."""
    curve = one.curve(measure)
    end = len(curve.rounds) if limit is None else int(np.searchsorted(curve.rounds, limit, side="right"))
    chosen = thinned(end, most)
    factor = scale(measure, one.columns)
    std = curve.std[chosen] * factor
    return Points(curve.rounds[chosen], curve.mean[chosen] * factor, None if np.isnan(std).all() else std)


def points_by_run(one: Group, measure: str, most: int, limit: int | None = None) -> list[Points]:
    """As ``points``, of each run of a group."""
    found = []
    for run in one.runs:
        values = run.series[measure]
        known = np.flatnonzero(~np.isnan(values) & (run.rounds <= (run.done if limit is None else limit)))
        chosen = known[thinned(len(known), most)]
        found.append(Points(run.rounds[chosen], scale(measure, one.columns) * values[chosen], None))
    return found


class Series(NamedTuple):
    """A group in a chart: its name in the legend, and how its curve looks."""

    group: Group
    label: str
    look: Look


def series(groups: Sequence[Group]) -> list[Series]:
    """The groups of one chart."""
    names = [f"{name}{_diverged(one)}" for one, name in zip(groups, labels(groups), strict=True)]
    return [Series(*each) for each in zip(groups, names, looks(groups), strict=True)]


def _diverged(one: Group) -> str:
    """The end of the name of a group with runs that did."""
    return f", {one.diverged} of {len(one.runs)} diverged" if one.diverged else ""


@dataclass(frozen=True)
class Panel:
    """Curves of one measure over the rounds up to ``rounds``, with the points that others have published."""

    title: str
    measure: str
    rounds: int
    series: list[Series]
    published: Mapping[str, Sequence[tuple[float, float]]]  # by method: round and value

    @property
    def done(self) -> int:
        return max((each.group.done for each in self.series), default=0)


def spent(one: Group, what: str, rounds: np.ndarray) -> np.ndarray:
    """What had been spent by the end of these rounds: "units" (per participant), "bytes" or "seconds" (``SPENT``)."""
    if what == "units":
        at, units, participants = _amounts(one, "paper_units", "participants")
        amounts = units / np.maximum(participants, 1)
    elif what == "bytes":
        at, down, up = _amounts(one, "bytes_down", "bytes_up")
        amounts = down + up
    else:
        at, amounts = _amounts(one, "seconds_total")
    if not len(at):
        return np.full(len(rounds), np.nan)
    total = np.cumsum(amounts)
    return total[np.clip(np.searchsorted(at, rounds, side="right") - 1, 0, len(at) - 1)]


def _amounts(one: Group, *names: str) -> list[np.ndarray]:
    """The rounds of any of the runs that have all of these, and of each its means over the runs that got so far."""
    rounds = np.unique(np.concatenate([run.rounds for run in one.runs]))
    table = np.full((len(names), len(one.runs), len(rounds)), np.nan)
    for i, run in enumerate(one.runs):
        table[:, i, np.searchsorted(rounds, run.rounds)] = [run.series[name] for name in names]
    known = ~np.isnan(table).all(axis=1).any(axis=0)
    return [rounds[known], *np.nanmean(table[:, :, known], axis=1)]


class Bars(NamedTuple):
    """A phase of a round in a bar chart: its seconds in each group, None where they are not known."""

    phase: str
    colour: str
    seconds: list[float | None]


def phase_bars(groups: Sequence[Group]) -> list[Bars]:
    return [
        Bars(phase, colour, [_finite_mean(one.curve(f"seconds_{phase}").mean) for one in groups])
        for phase, colour in zip(PHASES, PHASE_COLOURS, strict=True)
    ]


def _finite_mean(values: np.ndarray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None
