"""The paper's values and settings, as they are in paper.toml, and the runs that stand for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .. import settings
from ..algorithms import resolve
from ..analysis import measures
from ..analysis.groups import Group, kind
from ..rundir.columns import ACCURACY

# Settings that the paper leaves open: runs with other values are still compared with it, and a note names these.
OPEN = frozenset(
    {"precision", "sampling", "exhausted", "partition_seed", "decay_mode", "decay_on"}
    | {"v_init", "eps_v", "v_max", "bias_correction", "correct_after_max", "v0", "smu_mu"}
)
TUNED = "tuned"
UNTUNED = "Methods without tuned settings are shown with the paper's."
PER_ROUND = ("units_per_client", "bytes_per_round")  # measures of all rounds, not of a certain one


@cache
def contents() -> dict[str, Any]:
    """paper.toml as it is."""
    return settings.load(Path(__file__).with_name("paper.toml"))


def where(spec: Mapping[str, Any], column: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a table's and its column's runs have in common."""
    return {**spec.get("where", {}), **column.get("where", {})}


# Methods that are another one at a certain alpha, whose runs then stand for them.
SAME = {
    ("scaffold", 0.0): "fedavg",
    ("fedcm", 1.0): "fedavg",
    ("fedadam_amended", 1.0): "fedadam",
    ("fedlada", 1.0): "localadam",
}


def match(groups: Sequence[Group], wanted: Mapping[str, Any]) -> tuple[Group | None, list[str]]:
    """The group with these settings and otherwise the presets, and the open settings in which it differs."""
    found = _match(groups, wanted)
    same = SAME.get((wanted.get("algorithm", ""), wanted.get("alpha", math.nan)))
    if found[0] is None and same is not None:
        return _match(groups, {**{n: v for n, v in wanted.items() if n != "alpha"}, "algorithm": same})
    return found


def _match(groups: Sequence[Group], wanted: Mapping[str, Any]) -> tuple[Group | None, list[str]]:
    """As ``match``, for the method itself."""
    values = resolve(wanted).config.record()
    best: tuple[Group | None, list[str]] = None, []
    for one in groups:
        if one.dataset != kind(values["dataset"]) or one.method != values["algorithm"]:
            continue
        if one.columns.objective != ACCURACY:
            continue
        differing = [n for n, v in one.settings.items() if n != "dataset" and v != values[n]]
        if set(differing) <= OPEN and (best[0] is None or len(differing) < len(best[1])):
            best = one, differing
    return best


def any_tuned(groups: Sequence[Group]) -> bool:
    return any(one.settings.get("preset") == TUNED for one in groups)


def named(name: str, title: str, chosen: Mapping[str, Any]) -> tuple[str, str]:
    """Id and title of a table; ``chosen`` are settings of every run in it."""
    return (f"{name}_{TUNED}", f"{title}, {TUNED}") if chosen else (name, title)


def measure(column: Mapping[str, Any], horizon: int | None = None) -> measures.Measure:
    """The measure that a column of paper.toml asks for; ``horizon``: the round behind which "never" begins."""
    name = column["measure"]
    if name == "rounds_to_train":
        return measures.rounds_to("train_acc", column["level"], horizon)
    if name == "train_ratio":
        return measures.ratio(*(measures.rounds_to("train_acc", level, horizon) for level in column["levels"]))
    if name == "rounds_to_test":
        return measures.rounds_to("test_acc", column["level"], horizon)
    if name == "units_to_test":
        return measures.total_to("paper_units", column["level"], per_participant=True, horizon=horizon)
    if name == "test_at":
        return measures.test_at(column["round"])
    if name == "test_when_train":
        return measures.test_when_train(column["level"])
    if name == "best_test":
        return measures.best(column["round"])
    if name == "best_round":
        return measures.best(column["round"], "round")
    if name == "units_per_client":
        return measures.per_round("paper_units", per_participant=True)
    if name == "bytes_per_round":
        return measures.per_round("bytes_down", "bytes_up")
    raise KeyError(name)


def levels() -> dict[str, list[float]]:
    """The test accuracies whose rounds the paper prints, by data set."""
    known: dict[str, set[float]] = {}
    for spec in contents()["tables"]:
        for column in spec["columns"]:
            if column["measure"] == "rounds_to_test":
                known.setdefault(where(spec, column)["dataset"], set()).add(column["level"])
    return {dataset: sorted(values) for dataset, values in known.items()}


def published(dataset: str) -> dict[str, list[tuple[float, float]]]:
    """What the paper prints as (rounds, test accuracy in per cent), by method: points to draw next to our curves."""
    points: dict[str, list[tuple[float, float]]] = {}
    for spec in contents()["tables"]:
        if spec["id"] not in ("rounds_to_test", "rounds_to_test_high", "accuracy_1500"):
            continue
        for column in spec["columns"]:
            if column["where"]["dataset"] == dataset and "over" not in column:
                for method, value in zip(spec["rows"]["algorithm"], column["paper"], strict=True):
                    at = (column["round"], value) if "round" in column else (value, 100 * column["level"])
                    if math.isfinite(at[0]):
                        points.setdefault(method, []).append(at)
    return points
