"""What a curve looks like, in print or in the browser: its name, colour, axis and points."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np

from .. import algorithms
from .groups import Curve, Group

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
# Distinguishable also for colour-blind readers, on white and on black.
_OTHERS = (
    *("#6f5fc9", "#b8336a", "#5b8c2a", "#3f8f9c", "#8c5a3c", "#c2542d", "#4a6fa5", "#9a7d0a", "#7b3f8c", "#2f7d5b"),
    *("#b35c8f", "#56707a", "#a34747"),
)
_SEQUENCE = ("#440154", "#3b528b", "#21918c", "#5ec962", "#d8b30f", "#e8762c", "#c0266d", "#7a5195")


def colours(groups: Sequence[Group]) -> list[str]:
    """One colour per method; where a method comes several times, a sequence instead, or shades of its colour."""
    methods = list(dict.fromkeys(g.method for g in groups))
    several = [m for m in methods if sum(g.method == m for g in groups) > 1]
    chosen, seen = [], dict.fromkeys(methods, 0)
    for one in groups:
        base = _colour(one.method, methods)
        index, many = seen[one.method], sum(g.method == one.method for g in groups)
        seen[one.method] += 1
        if one.method not in several:
            chosen.append(base)
        elif len(several) == 1 and many <= len(_SEQUENCE):
            chosen.append(_SEQUENCE[index])
        else:
            chosen.append(_shade(base, index / max(1, many - 1)))
    return chosen


def sequence(count: int) -> list[str]:
    """Colours of an ordered set."""
    return [_SEQUENCE[i % len(_SEQUENCE)] for i in range(count)]


def _colour(method: str, methods: Sequence[str]) -> str:
    """A method's own colour; without one, a colour by its place among all methods, the same in every figure."""
    known = algorithms.names()
    if method in known and (own := algorithms.find(method).colour):
        return own
    return _OTHERS[(known if method in known else methods).index(method) % len(_OTHERS)]


def _shade(colour: str, fraction: float) -> str:
    """The colour from dark (0) to light (1)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, _, strength = colorsys.rgb_to_hls(red, green, blue)
    mixed = colorsys.hls_to_rgb(hue, 0.28 + 0.44 * fraction, strength)
    return "#" + "".join(f"{round(255 * c):02x}" for c in mixed)


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
