"""The claims of the paper's text, checked on our runs and on the paper's own tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..analysis.groups import Group
from ..analysis.tables import NOT_RUN, Cell, Column, Table, number
from . import paper

ABOUT, POINTS = 0.1, 0.5  # how far from a value that the text calls approximate: a share of it, or points of accuracy
NOTE = (
    "“About” is two-sided: within a tenth of the value or, for accuracies, half a point, whichever is wider. Ours are "
    "means over seeds; where runs end below a level, the rounds they had are a bound. “Undecided”: the bound says "
    "neither, or some seeds are unfinished. The last column has the value and the verdict by the paper's own tables. "
    "Of CIFAR-10 the text says only that the speed is similar to that of many SGD-based methods, so that its factors "
    "over these and LocalAdam are not checked there."
)


class Range(NamedTuple):
    """A number that is known to lie between two; the same twice where it is known."""

    low: float
    high: float

    @property
    def text(self) -> str:
        if self.low == self.high:
            return number(self.low, 2)
        return f"> {number(self.low, 2)}" if math.isinf(self.high) else f"< {number(self.high, 2)}"


UNDECIDED = Range(-math.inf, math.inf)
Lookup = Callable[[Mapping[str, Any], Mapping[str, Any]], Range | None]  # settings and a measure; None: not run


def tables(groups: Sequence[Group]) -> list[Table]:
    """The claims with the paper's settings and, where there are such runs, with tuned ones."""
    return [_table(groups, {}), *([_table(groups, {"preset": paper.TUNED})] if paper.any_tuned(groups) else [])]


def _table(groups: Sequence[Group], chosen: Mapping[str, Any]) -> Table:
    """``chosen`` are settings of every run."""
    columns = [
        *(Column("Claim", numeric=False), Column("ours"), Column("paper"), Column("holds", numeric=False)),
        Column("by the paper's tables"),
    ]
    rows = []
    for i, spec in enumerate(paper.contents()["claims"]):
        ours = _value(spec, lambda where, measure: _measured(groups, {**where, **chosen}, measure))
        verdict = NOT_RUN if ours is None else _verdict(spec, ours)
        unit = " times" if "ratio" in spec else f" point{'s' * (spec['value'] != 1)}"
        known = ours is not None and ours != UNDECIDED
        rows.append(
            [
                Cell(spec["text"], sort=float(i), hint=spec["source"]),
                Cell(ours.text, ours.low, seeds=1) if ours is not None and known else Cell(),
                Cell(f"{'about' if spec.get('about') else 'over'} {spec['value']:g}{unit}", float(spec["value"])),
                Cell(verdict, tone={"yes": "better", "no": "worse"}.get(verdict.partition(",")[0], "")),
                _by_the_paper(spec),
            ]
        )
    notes = [NOTE, paper.UNTUNED] if chosen else [NOTE]
    name, title = paper.named("claims", "Claims of the text", chosen)
    return Table(name, title, columns, rows, "Sections 1 and 4, and appendix", notes, paper=True)


def _by_the_paper(spec: Mapping[str, Any]) -> Cell:
    """What the paper's own tables say of its claim."""
    printed = _value(spec, _printed)
    return Cell() if printed is None else Cell(f"{printed.text}: {_verdict(spec, printed)}", printed.low)


def _verdict(spec: Mapping[str, Any], found: Range) -> str:
    value = spec["value"]
    if not spec.get("about"):
        return "yes" if found.low > value else "no" if found.high <= value else "undecided"
    room = max(ABOUT * abs(value), POINTS if "gain" in spec else 0.0) + 1e-9  # 41.9 - 34.5 is not quite 7.4
    if found.high < value - room:
        return "no, less"
    if found.low > value + room:
        return "no, more"
    return "yes" if value - room <= found.low and found.high <= value + room else "undecided"


def _value(spec: Mapping[str, Any], lookup: Lookup) -> Range | None:
    """What the claim is about: a ratio of rounds or a gain of accuracy, the mean over its cases; None: not run."""
    found = []
    for case in spec.get("cases", [{}]):
        where = {**spec.get("where", {}), **case.get("where", {})}
        measure = {**(spec.get("ratio") or spec["gain"]), **case.get("measure", {})}
        ours = lookup({**where, **spec["of"]}, measure)
        others = [lookup({**where, **other}, measure) for other in spec["over"]]
        known = [other for other in others if other is not None]
        if ours is None or len(known) < len(others):
            return None
        if UNDECIDED in (ours, *known):
            return UNDECIDED
        if "ratio" in spec:
            best = Range(min(other.low for other in known), min(other.high for other in known))
            if math.isinf(ours.high) and math.isinf(best.high):
                return UNDECIDED
            found.append(Range(best.low / ours.high, best.high / ours.low))
        else:
            best = Range(max(other.low for other in known), max(other.high for other in known))
            found.append(Range(ours.low - best.high, ours.high - best.low))
    return Range(sum(one.low for one in found) / len(found), sum(one.high for one in found) / len(found))


def _measured(groups: Sequence[Group], where: Mapping[str, Any], measure: Mapping[str, Any]) -> Range | None:
    one, _ = paper.match(groups, where)
    values = [paper.measure(measure)(run) for run in one.aligned] if one else []
    if one is None or all(value is None for value in values):
        return None
    if None in values:
        return UNDECIDED
    never = any(value is not None and math.isinf(value) for value in values)
    low = [float(run.done) if value == math.inf else value or 0.0 for run, value in zip(one.runs, values, strict=True)]
    mean = sum(low) / len(low)
    return Range(mean, math.inf if never else mean)


def _printed(where: Mapping[str, Any], measure: Mapping[str, Any]) -> Range | None:
    """The paper's value of a measure with these settings, where one of its tables has it."""
    for spec in paper.contents()["tables"]:
        ((setting, values),) = spec["rows"].items()
        for column in spec["columns"]:
            settings = {**paper.where(spec, column), setting: where.get(setting)}
            asked = {name: column.get(name) for name in measure}
            if settings == where and asked == measure and not {"over", "minus"} & column.keys():
                value = column["paper"][values.index(where[setting])] if where[setting] in values else math.nan
                if not math.isnan(value):
                    return Range(float(value), float(value))
    return None
