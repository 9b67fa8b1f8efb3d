"""The paper's tables with our values next to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..analysis import measures
from ..analysis.groups import Group, Stat, dataset_name, method_name, show
from ..analysis.tables import NOT_RUN, Cell, Column, Table, number, stat
from . import agreement, paper, resolution

ROUNDS = 1500  # what "never" means in the paper
# Measures that depend on how often is evaluated, and on which part of the data.
FIRST_HITS = {"rounds_to_test": "test", "best_test": "test", "rounds_to_train": "train", "train_ratio": "train"}
ACCURACIES = ("test_at", "test_at_fit", "test_when_train", "best_test")


def tables(groups: Sequence[Group]) -> list[Table]:
    """The paper's tables with its settings; and with tuned ones, those of them in which tuned runs appear."""
    specs = paper.contents()["tables"]
    tuned = [spec for spec in specs if _tuned(spec, groups)] if paper.any_tuned(groups) else []
    of_paper = [_table(spec, groups, {}) for spec in specs]
    extra = [table for table in (agreement.table(of_paper), *resolution.tables(groups)) if table.rows]
    return [*of_paper, *extra, *(_table(spec, groups, {"preset": paper.TUNED}) for spec in tuned)]


def _tuned(spec: Mapping[str, Any], groups: Sequence[Group]) -> bool:
    """Whether a table has tuned runs; methods without tuned settings have the paper's."""
    found = (
        paper.match(groups, {**where, "preset": paper.TUNED})[0]
        for column in spec["columns"]
        for where in _cells(spec, column)
    )
    return any(one is not None and one.settings["preset"] == paper.TUNED for one in found)


def _cells(spec: Mapping[str, Any], column: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of each cell of a column."""
    ((setting, values),) = spec["rows"].items()
    return [{**paper.where(spec, column), setting: value} for value in values]


def _table(spec: Mapping[str, Any], groups: Sequence[Group], chosen: Mapping[str, Any]) -> Table:
    """A table of the paper; ``chosen`` are settings of every run in it."""
    ((setting, values),) = spec["rows"].items()
    names = spec.get("labels") or [method_name(v) if setting == "algorithm" else f"{v:g}" for v in values]
    notes = [spec["note"]] if "note" in spec else []
    notes += [paper.UNTUNED] if chosen else []
    columns = [Column("Method" if setting == "algorithm" else setting.replace("_", " ").capitalize(), numeric=False)]
    rows = [[Cell(name, sort=float(i))] for i, name in enumerate(names)]
    horizon = spec.get("horizon")
    shown: dict[int, tuple[Group, str]] = {}  # with the other open settings that they were run with
    for column in spec["columns"]:
        found: dict[Any, Group | None] = {}
        for value, where in zip(values, _cells(spec, column), strict=True):
            one, differing = paper.match(groups, {**where, **chosen})
            found[value] = one
            if one:
                shown[id(one)] = one, ", ".join(show(n, one.settings[n]) for n in differing)
            if one and one.method != where["algorithm"]:
                stands = f"{one.method_name} stands for {method_name(where['algorithm'])} at {show(setting, value)}."
                notes += [stands] if stands not in notes else []
        if column["measure"] == "test_at_fit":
            measure, note = _fitted(list(found.values()), column["paper"], column["round"])
            notes.append(note)
        else:
            measure = paper.measure(column, horizon)
        stats = {value: _over(one, measure, column, horizon) if one else Stat() for value, one in found.items()}
        printed = not all(math.isnan(p) for p in column["paper"])
        columns += [Column(n, column["name"]) for n in (("ours", "paper", "difference") if printed else ("ours",))]
        for i, (row, value, theirs) in enumerate(zip(rows, values, column["paper"], strict=True)):
            ours = _relative(stats, value, column)
            row.append(_ours(ours, found[value], column))
            if printed:
                also = column["also"][i] if "also" in column else math.nan
                row += [_printed(theirs, column, also), _difference(ours, theirs, column, also)]
    parts = {FIRST_HITS[column["measure"]] for column in spec["columns"] if column["measure"] in FIRST_HITS}
    notes += _intervals([one for one, _ in shown.values()], sorted(parts))
    notes += [*_uneven(one for one, _ in shown.values()), *_otherwise(shown.values())]
    name, title = paper.named(spec["id"], spec["title"], chosen)
    return Table(name, title, columns, rows, spec["source"], notes, paper=True)


def _intervals(groups: Sequence[Group], parts: Sequence[str]) -> list[str]:
    """A note on the rounds from one evaluation to the next, by which a first round can be late."""
    steps = {part: sorted({step for one in groups for step in _steps(one, part)}) for part in parts}
    said = [f"on the {part} data every {' or '.join(map(str, known))} rounds" for part, known in steps.items() if known]
    said = said if any(known != [1] for known in steps.values()) else []
    return [f"Evaluated {' and '.join(said)}."] if said else []


def _steps(one: Group, part: str) -> set[int]:
    """The rounds between evaluations that all seeds have."""
    return set(np.diff(one.curve(one.columns.objective.of(part)).rounds).tolist())


def _uneven(groups: Iterable[Group]) -> list[str]:
    """Notes on methods whose seeds differ in their rounds, one for all with the same."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in groups:
        if one.uneven:
            alike.setdefault((dataset_name(one.dataset), one.uneven), []).append(one.method_name)
    return [f"{', '.join(methods)} on {dataset}: {why}." for (dataset, why), methods in alike.items()]


def _otherwise(groups: Iterable[tuple[Group, str]]) -> list[str]:
    """Notes on methods that were run with other open settings, which come with their groups; empty: with none."""
    alike: dict[tuple[str, str], list[str]] = {}
    known = list(groups)
    if len(known) > 1 and len(every := {used for _, used in known}) == 1 and any(every):
        return [f"All were run with {known[0][1]}."]
    for one, used in known:
        methods = alike.setdefault((dataset_name(one.dataset), used), [])
        methods += [one.method_name] if one.method_name not in methods else []
    return [
        f"{', '.join(methods)} on {dataset} {'was' if len(methods) == 1 else 'were'} run with {used}."
        for (dataset, used), methods in alike.items()
        if used
    ]


def _over(one: Group, measure: measures.Measure, column: Mapping[str, Any], horizon: int | None) -> Stat:
    return one.latest(measure) if column["measure"] in paper.PER_ROUND else one.over(measure, horizon)


def _ours(value: Stat, one: Group | None, column: Mapping[str, Any]) -> Cell:
    """Our value; where there is none, that nothing was run, or how far the runs got."""
    cell = stat(value, _digits(column))
    if cell != Cell():
        return cell
    if one is None or not one.done:
        return Cell(NOT_RUN)
    if one.done < column.get("round", 0) or not all(run.complete for run in one.runs):
        return Cell(f"at round {one.done:,}", hint="the runs got so far")
    return cell


def _digits(column: Mapping[str, Any]) -> int | None:
    """The decimals of a column; None: as many as suit its numbers."""
    return column.get("digits", 2 if "over" in column else 1 if column["measure"] in ACCURACIES else None)


def _fitted(groups: Sequence[Group | None], theirs: Sequence[float], last: int) -> tuple[measures.Measure, str]:
    """The test accuracy after the round up to ``last`` in which all groups together are nearest to the paper's values,
    which it prints without saying after which round; and how that round was chosen."""
    rows = [(one.curve("test_acc"), value) for one, value in zip(groups, theirs, strict=True) if one is not None]
    common = set.intersection(*({*curve.rounds.tolist()} for curve, _ in rows)) if rows else set()
    rounds = np.array(sorted(r for r in common if r <= last), dtype=int)
    said = "The paper does not say after which round."
    if not len(rounds) or len(rows) < 2:
        return measures.test_at(last), f"{said} Ours is after {last:,}: a round is chosen once two rows have been run."
    errors = np.zeros(len(rounds))
    for (at, mean, *_), value in rows:
        errors += (100 * mean[np.searchsorted(at, rounds)] - value) ** 2
    best = int(rounds[np.argmin(errors)])
    to = int(rounds[-1])  # the last that all rows have
    chosen = f"Ours is after round {best:,}: of all up to {to:,}, the one in which the sum of squared differences from"
    return measures.test_at(best), f"{said} {chosen} the paper is least, over {len(rows)} of {len(theirs)} rows."


def _relative(stats: Mapping[Any, Stat], value: Any, column: Mapping[str, Any]) -> Stat:
    """The value itself, or relative to the mean of the row that the column names, or to the least."""
    one = stats[value]
    name = column.get("over", column.get("minus"))
    if name is None:
        return one
    bases = stats.values() if name == "least" else [stats[name]]
    base = min((s.mean for s in bases if s.mean is not None and s.complete), default=None)
    if base is None or (base == 0 and "over" in column) or one.mean is None or not one.complete:
        return Stat((), one.of)
    return Stat((one.mean / base if "over" in column else one.mean - base,), 1)


def _printed(theirs: float, column: Mapping[str, Any], also: float = math.nan) -> Cell:
    """The paper's value, and the other one where two of its tables disagree."""
    if math.isfinite(also) and also != theirs:
        first, second = (_printed(value, column).text for value in (theirs, also))
        return Cell(f"{first} or {second}", float(theirs), hint="two tables of the paper disagree")
    if math.isnan(theirs):
        return Cell()
    if math.isinf(theirs):
        return Cell("∞", None, sort=math.inf, hint="never, says the paper")
    digits = _digits(column)
    if digits is None:
        digits = 0 if all(p == round(p) for p in column["paper"] if math.isfinite(p)) else 1
    return Cell(number(float(theirs), digits), float(theirs))


def _difference(ours: Stat, theirs: float, column: Mapping[str, Any], also: float = math.nan) -> Cell:
    """Ours minus the paper's; highlighted where it is more than a twentieth of the paper's rounds, or half a point.

    There is no verdict from a part of the runs, nor where the paper itself has two values.
    """
    if ours.mean is not None and not ours.complete:
        part = f"{len(ours.values)} of {ours.of} {'runs' if ours.beyond is None else 'reached it'}"
        return Cell(part, hint="no verdict from a part of the runs")
    if math.isfinite(also) and also != theirs:
        both = [_difference(ours, value, column) for value in (theirs, also)]
        known = all(cell != Cell() for cell in both)
        return Cell(" or ".join(cell.text for cell in both), both[0].value) if known else Cell()
    never = ours.mean is None and ours.beyond is not None
    if math.isinf(theirs):
        if never and ours.beyond is not None and ours.beyond >= ROUNDS:
            return Cell("agree", sort=0.0)
        return Cell("reached", sort=-math.inf, tone="better") if ours.mean is not None else Cell()
    if never and ours.beyond is not None and ours.beyond > theirs:
        return Cell(f"> +{ours.beyond - theirs:,.0f}", sort=math.inf, tone="worse")
    if ours.mean is None or math.isnan(theirs):
        return Cell()
    difference = ours.mean - theirs
    accuracy = column["measure"] in ACCURACIES
    digits = _digits(column)
    if digits is None:
        digits = 0 if abs(difference) >= 100 or difference == round(difference) else 1
    shown = ("+" if difference > 0 else "") + number(difference, digits)
    if not accuracy and "over" not in column and theirs and difference:
        shown += f" ({100 * difference / theirs:+.0f} %)".replace("-", "−")
    tone = ""
    # Factors are relative to the fastest method, which may be another one in our runs.
    if (
        column["measure"] != "best_round"
        and column.get("over") != "least"
        and abs(difference) > (0.5 if accuracy else 0.05 * abs(theirs))
    ):
        tone = "better" if (difference > 0) == accuracy else "worse"
    return Cell(shown, difference, tone=tone)
