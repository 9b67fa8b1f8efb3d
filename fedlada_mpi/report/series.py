"""What a curve looks like, in print or in the browser: its name, colour, axis and points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np

from .. import algorithms
from .groups import Curve, Group
from .measures import by_silo

MEASURES = {
    "test_acc": "Test accuracy (%)",
    "train_loss": "Training loss",
    "train_acc": "Train accuracy (%)",
    "test_loss": "Test loss",
    "consistency": "Consistency  mean ‖x_i − x‖²",
    "local_loss": "Local loss",
    "drift": "Client drift  mean ‖x_i − xᵗ‖²",
    "drift_ratio": "Client drift / squared global step",
    "direction_cosine": "Cosine of g_a and the true gradient",
    "gradient_norm": "True gradient ‖∇F(xᵗ)‖",
    "gradient_norm_z": "True gradient ‖∇F(zᵗ)‖",
    "step_cosine": "Cosine of successive global steps",
    "step_change": "Squared change of the step / squared step",
    "val_acc": "Validation accuracy (%)",
    "val_loss": "Validation loss",
    "client_test_acc_mean": "Clients' test accuracy, mean (%)",
    "client_test_acc_std": "Clients' test accuracy, standard deviation (%)",
    "client_test_acc_worst_decile": "Clients' test accuracy, worst tenth (%)",
    "client_train_acc_mean": "Clients' train accuracy, mean (%)",
    "client_train_acc_std": "Clients' train accuracy, standard deviation (%)",
    "client_train_acc_worst_decile": "Clients' train accuracy, worst tenth (%)",
}
PERCENT = tuple(measure for measure, name in MEASURES.items() if name.endswith("(%)"))
LOGARITHMIC = ("consistency", "drift", "drift_ratio", "gradient_norm", "gradient_norm_z", "step_change")


ONE_PANEL = 10  # groups; more cannot be distinguished in one panel


def with_silos(groups: Sequence[Group]) -> list[Group]:
    """Those whose values are known silo by silo; none where they are too many to show."""
    known = [one for one in groups if len(by_silo(one.runs).get("silos", ())) > 1]
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


def points(one: Group, measure: str, most: int, limit: int | None = None) -> Curve:
    """Rounds, mean, standard deviation and number of runs, in the units of the axis."""
    rounds, mean, std, count = one.curve(measure)
    if limit is not None:
        keep = int(np.searchsorted(rounds, limit, side="right"))
        rounds, mean, std, count = rounds[:keep], mean[:keep], std[:keep], count[:keep]
    chosen = thinned(len(rounds), most)
    scale = 100.0 if measure in PERCENT else 1.0
    return rounds[chosen], mean[chosen] * scale, std[chosen] * scale, count[chosen]


def spent(one: Group, what: str, rounds: np.ndarray) -> np.ndarray:
    """What had been spent by the end of these rounds: "units" (per participant), "bytes" or "seconds"."""
    if what == "units":
        units, participants = one.curve("paper_units"), one.curve("participants")
        at = units[0]
        amounts = units[1] / np.maximum(_values(participants, at), 1)
    elif what == "bytes":
        down, up = one.curve("bytes_down"), one.curve("bytes_up")
        at = np.intersect1d(down[0], up[0])
        amounts = _values(down, at) + _values(up, at)
    else:
        at, amounts = one.curve("seconds_total")[:2]
    if not len(at):
        return np.full(len(rounds), np.nan)
    total = np.cumsum(amounts)
    return total[np.clip(np.searchsorted(at, rounds, side="right") - 1, 0, len(at) - 1)]


def _values(curve: Curve, rounds: np.ndarray) -> np.ndarray:
    """The means at these rounds, which the curve has."""
    return curve[1][np.searchsorted(curve[0], rounds)]


def finite_mean(values: np.ndarray) -> float | None:
    """The mean of the finite values; None if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None
