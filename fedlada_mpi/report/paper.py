"""The paper's tables with our values next to them, and its figures as lists of groups. Its values are in paper.toml."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .. import config as settings
from . import measures
from .groups import Group, Stat, dataset_name, kind, method_name, show
from .tables import Cell, Column, Table, number, stat

# Settings that the paper leaves open: runs with other values are still compared with it, and a note names these.
OPEN = frozenset(
    {"precision", "sampling", "exhausted", "partition_seed", "decay_mode", "decay_on"}
    | {"v_init", "eps_v", "v_max", "bias_correction", "v0", "smu_mu"}
)
ROUNDS = 1500  # what "never" means in the paper
ACCURACIES = ("test_at", "test_at_fit", "test_when_train", "best_test")


@cache
def contents() -> dict[str, Any]:
    """paper.toml as it is."""
    return settings.load(Path(__file__).with_name("paper.toml"))


def match(groups: Sequence[Group], where: Mapping[str, Any]) -> tuple[Group | None, list[str]]:
    """The group with these settings and otherwise the presets, and the open settings in which it differs."""
    wanted = settings.resolve(where).config.record()
    best: tuple[Group | None, list[str]] = None, []
    for one in groups:
        if one.dataset != kind(wanted["dataset"]) or one.method != wanted["algorithm"]:
            continue
        differing = [n for n, v in one.settings.items() if n != "dataset" and v != wanted[n]]
        if set(differing) <= OPEN and (best[0] is None or len(differing) < len(best[1])):
            best = one, differing
    return best


def tables(groups: Sequence[Group]) -> list[Table]:
    return [claims(groups), *(_table(spec, groups) for spec in contents()["tables"])]


ABOUT = 0.9  # of a value that the text calls approximate


def claims(groups: Sequence[Group]) -> Table:
    """What the paper's text claims, and whether our runs bear it out."""
    columns = [Column("Claim", numeric=False), Column("ours"), Column("paper"), Column("holds", numeric=False)]
    rows = []
    for i, spec in enumerate(contents()["claims"]):
        ours, verdict = _claimed(spec, groups)
        about = "about " if spec.get("about") else "over "
        unit = " times" if "ratio" in spec else f" point{'s' * (spec['value'] != 1)}"
        rows.append(
            [
                Cell(spec["text"], sort=float(i), hint=spec["source"]),
                stat(ours, 2),
                Cell(f"{about}{spec['value']:g}{unit}", float(spec["value"])),
                Cell(verdict, tone={"yes": "better", "no": "worse"}.get(verdict, "")),
            ]
        )
    note = (
        "“About” a value holds from 90 % of it on. Where some seeds never reached a level, the claim counts as not run."
    )
    return Table("claims", "Claims of the text", columns, rows, "Sections 1 and 6", [note], paper=True)


def _claimed(spec: Mapping[str, Any], groups: Sequence[Group]) -> tuple[Stat, str]:
    """Our value of what a claim is about, and whether it holds: yes, no, or not run."""
    measured = spec.get("ratio") or spec["gain"]
    measure = measures.named(measured)

    def of(which: Mapping[str, Any]) -> Stat:
        one, _ = match(groups, {**spec["where"], **which})
        found = one.over(measure) if one else Stat()
        complete = len(found.values) == found.of or not found.values
        return found if complete else Stat()

    ours, others = of(spec["of"]), [of(which) for which in spec["over"]]
    known = [other.mean for other in others if other.mean is not None]
    if ours.mean is None or len(known) < len(others):
        never = ours.mean is None and ours.beyond is not None and len(known) == len(others)
        return Stat(), "no" if never else "not run"
    value = min(known) / ours.mean if "ratio" in spec else ours.mean - max(known)
    least = spec["value"] * (ABOUT if spec.get("about") else 1)
    return Stat((value,), 1), "yes" if value > least or (spec.get("about") and value == least) else "no"


def _table(spec: Mapping[str, Any], groups: Sequence[Group]) -> Table:
    ((setting, values),) = spec["rows"].items()
    names = spec.get("labels") or [method_name(v) if setting == "algorithm" else f"{v:g}" for v in values]
    notes = [spec["note"]] if "note" in spec else []
    columns = [Column("Method" if setting == "algorithm" else setting.replace("_", " ").capitalize(), numeric=False)]
    rows = [[Cell(name, sort=float(i))] for i, name in enumerate(names)]
    horizon = spec.get("horizon")
    otherwise: dict[tuple[str, str], list[str]] = {}  # methods that were run with other open settings
    for column in spec["columns"]:
        found: dict[Any, Group | None] = {}
        for value in values:
            where = {**spec.get("where", {}), **column.get("where", {}), setting: value}
            one, differing = match(groups, where)
            found[value] = one
            if one and differing:
                used = ", ".join(show(n, one.settings[n]) for n in differing)
                methods = otherwise.setdefault((dataset_name(one.dataset), used), [])
                methods += [one.method_name] if one.method_name not in methods else []
        if column["measure"] == "test_at_fit":
            measure, note = _fitted(list(found.values()), column["paper"], column["round"])
            notes.append(note)
        else:
            measure = measures.named(column, horizon)
        stats = {value: one.over(measure, horizon) if one else Stat() for value, one in found.items()}
        printed = not all(math.isnan(p) for p in column["paper"])
        columns += [Column(n, column["name"]) for n in (("ours", "paper", "difference") if printed else ("ours",))]
        for i, (row, value, paper) in enumerate(zip(rows, values, column["paper"], strict=True)):
            ours = _relative(stats, value, column)
            row.append(stat(ours, _digits(column)))
            if printed:
                also = column["also"][i] if "also" in column else math.nan
                row += [_printed(paper, column, also), _difference(ours, paper, column, also)]
    for (dataset, used), methods in otherwise.items():
        notes.append(f"{', '.join(methods)} on {dataset} {'was' if len(methods) == 1 else 'were'} run with {used}.")
    return Table(spec["id"], spec["title"], columns, rows, spec["source"], notes, paper=True)


def _digits(column: Mapping[str, Any]) -> int | None:
    """The decimals of a column; None: as many as suit its numbers."""
    return column.get("digits", 2 if "over" in column else 1 if column["measure"] in ACCURACIES else None)


def _fitted(groups: Sequence[Group | None], paper: Sequence[float], last: int) -> tuple[measures.Measure, str]:
    """The test accuracy after the round up to ``last`` in which all groups together are nearest to the paper's values,
    which it prints without saying after which round; and how that round was chosen."""
    rows = [(one.curve("test_acc"), value) for one, value in zip(groups, paper, strict=True) if one is not None]
    common = set.intersection(*({*curve[0].tolist()} for curve, _ in rows)) if rows else set()
    rounds = np.array(sorted(r for r in common if r <= last), dtype=int)
    said = "The paper does not say after which round."
    if not len(rounds):
        return measures.test_at(last), f"{said} There is no round yet in which all rows were evaluated."
    errors = np.zeros(len(rounds))
    for (at, mean, *_), value in rows:
        errors += (100 * mean[np.searchsorted(at, rounds)] - value) ** 2
    best = int(rounds[np.argmin(errors)])
    chosen = (
        f"Ours is after round {best:,}: of all up to {last:,}, the one in which the sum of squared differences from"
    )
    return measures.test_at(best), f"{said} {chosen} the paper is least, over {len(rows)} of {len(paper)} rows."


def _relative(stats: Mapping[Any, Stat], value: Any, column: Mapping[str, Any]) -> Stat:
    """The value itself, or relative to the mean of the row that the column names, or to the least."""
    one = stats[value]
    name = column.get("over", column.get("minus"))
    if name is None:
        return one
    if name == "least":
        complete = [s.mean for s in stats.values() if s.mean is not None and len(s.values) == s.of]
        base = min(complete, default=None)
    else:
        base = stats[name].mean
    if base is None or (base == 0 and "over" in column) or one.mean is None or one.beyond is not None:
        return Stat((), one.of)
    return Stat((one.mean / base if "over" in column else one.mean - base,), 1)


def _printed(paper: float, column: Mapping[str, Any], also: float = math.nan) -> Cell:
    """The paper's value, and the other one where two of its tables disagree."""
    if math.isfinite(also) and also != paper:
        first, second = (_printed(value, column).text for value in (paper, also))
        return Cell(f"{first} or {second}", float(paper), hint="two tables of the paper disagree")
    if math.isnan(paper):
        return Cell()
    if math.isinf(paper):
        return Cell("∞", None, sort=math.inf, hint="never, says the paper")
    digits = _digits(column)
    if digits is None:
        digits = 0 if all(p == round(p) for p in column["paper"] if math.isfinite(p)) else 1
    return Cell(number(float(paper), digits), float(paper))


def _difference(ours: Stat, paper: float, column: Mapping[str, Any], also: float = math.nan) -> Cell:
    """Ours minus the paper's; highlighted where it is more than a twentieth of the paper's rounds, or half a point.

    There is no verdict where only some runs reached the level, nor where the paper itself has two values.
    """
    if ours.mean is not None and ours.beyond is not None:
        return Cell(f"{len(ours.values)} of {ours.of} reached it", hint="no verdict from a part of the runs")
    if math.isfinite(also) and also != paper:
        both = [_difference(ours, value, column) for value in (paper, also)]
        known = all(cell != Cell() for cell in both)
        return Cell(" or ".join(cell.text for cell in both), both[0].value) if known else Cell()
    never = ours.mean is None and ours.beyond is not None
    if math.isinf(paper):
        if never and ours.beyond is not None and ours.beyond >= ROUNDS:
            return Cell("agree", sort=0.0)
        return Cell("reached", sort=-math.inf, tone="better") if ours.mean is not None else Cell()
    if never and ours.beyond is not None and ours.beyond > paper:
        return Cell(f"> +{ours.beyond - paper:,.0f}", sort=math.inf, tone="worse")
    if ours.mean is None or math.isnan(paper):
        return Cell()
    difference = ours.mean - paper
    accuracy = column["measure"] in ACCURACIES
    digits = _digits(column)
    if digits is None:
        digits = 0 if abs(difference) >= 100 or difference == round(difference) else 1
    shown = ("+" if difference > 0 else "") + number(difference, digits)
    if not accuracy and "over" not in column and paper and difference:
        shown += f" ({100 * difference / paper:+.0f} %)".replace("-", "−")
    tone = ""
    # Factors are relative to the fastest method, which may be another one in our runs.
    if (
        column["measure"] != "best_round"
        and column.get("over") != "least"
        and abs(difference) > (0.5 if accuracy else 0.05 * abs(paper))
    ):
        tone = "better" if (difference > 0) == accuracy else "worse"
    return Cell(shown, difference, tone=tone)


def levels() -> dict[str, list[float]]:
    """The test accuracies whose rounds the paper prints, by data set."""
    known: dict[str, set[float]] = {}
    for spec in contents()["tables"]:
        for column in spec["columns"]:
            if column["measure"] == "rounds_to_test":
                where = {**spec.get("where", {}), **column.get("where", {})}
                known.setdefault(where["dataset"], set()).add(column["level"])
    return {dataset: sorted(values) for dataset, values in known.items()}


def marks(dataset: str) -> dict[str, list[tuple[float, float]]]:
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


@dataclass
class Panel:
    title: str
    measure: str
    dataset: str
    groups: list[Group]
    marked: bool


@dataclass
class Figure:
    id: str
    title: str
    source: str
    rounds: int
    panels: list[Panel]
    missing: list[str]

    @property
    def empty(self) -> bool:
        return not any(panel.groups for panel in self.panels)


def figures(groups: Sequence[Group]) -> list[Figure]:
    """Each of the paper's figures with the groups that there are for it, and the names of those that are missing."""
    result = []
    for spec in contents()["figures"]:
        panels, missing = [], []
        for panel in spec["panels"]:
            available = []
            for series in spec["series"]:
                where = {**panel["where"], **series}
                one, _ = match(groups, where)
                if one is not None and one.done:
                    available.append(one)
                else:
                    missing.append(_wanted(where))
            dataset = panel["where"]["dataset"]
            title = " ".join([dataset_name(dataset), *([panel["title"]] if "title" in panel else [])])
            panels.append(Panel(title, panel["measure"], dataset, available, spec["id"] == "all_methods"))
        unique = list(dict.fromkeys(missing))
        result.append(Figure(spec["id"], spec["title"], spec["source"], spec["rounds"], panels, unique))
    return result


def _wanted(where: Mapping[str, Any]) -> str:
    """A missing run in words."""
    rest = [show(n, v) for n, v in where.items() if n not in ("dataset", "algorithm")]
    return " ".join([dataset_name(where["dataset"]), method_name(where["algorithm"]), *rest])
