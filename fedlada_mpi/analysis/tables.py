"""Tables: cells that know their number, written as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

from ..rundir.columns import ACCURACY, CLASSIFICATION, Columns, Metric
from .groups import Group, Stat, by_objective, by_problem, labels, slug

MISSING = "–"
NOT_RUN = "not run"
SHORTEST = 1e-6  # seconds that a table tells from none
WORTH_A_COLUMN = 0.005  # of a round, for a phase


class Cell(NamedTuple):
    """The text shown, the number behind it, and how it sorts where it has none."""

    text: str = MISSING
    value: float | None = None
    std: float | None = None
    seeds: int | None = None
    sort: float | None = None
    hint: str = ""
    tone: str = ""


class Column(NamedTuple):
    """A column, possibly one of several under a common heading ``over``."""

    name: str
    over: str = ""
    numeric: bool = True

    @property
    def full(self) -> str:
        return f"{self.over}: {self.name}" if self.over else self.name


@dataclass
class Table:
    """A table with its notes. On the page it is in the section of that name, if any, and with ``pictured`` the figure
    of its id is below it. ``paper``: columns "ours" are next to a paper's values."""

    id: str
    title: str
    columns: list[Column]
    rows: list[list[Cell]]
    source: str = ""
    notes: list[str] = field(default_factory=list)
    paper: bool = False
    section: str = ""
    pictured: bool = False

    @property
    def headings(self) -> list[tuple[str, int, int]]:
        """The common headings with their first and last columns, from 1; columns without one have an empty one. None
        where no column has any."""
        spans: list[tuple[str, int, int]] = []
        for i, column in enumerate(self.columns, 1):
            if spans and column.over and spans[-1][0] == column.over:
                spans[-1] = (column.over, spans[-1][1], i)
            else:
                spans.append((column.over, i, i))
        return spans if any(text for text, _, _ in spans) else []

    @property
    def empty(self) -> bool:
        """Whether no run contributed to it."""
        ours = [i for i, c in enumerate(self.columns) if c.name == "ours" or not self.paper]
        return not any(row[i].seeds or (not self.paper and row[i].text != MISSING) for row in self.rows for i in ours)

    def csv(self) -> str:
        over_seeds = [any(row[i].seeds is not None for row in self.rows) for i in range(len(self.columns))]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        header: list[str] = []
        names = [_no_formula(column.full) for column in self.columns]
        for name, has_std in zip(names, over_seeds, strict=True):
            header += [name, f"{name} std", f"{name} seeds"] if has_std else [name]
        writer.writerow(header)
        for row in self.rows:
            line: list[object] = []
            for cell, has_std in zip(row, over_seeds, strict=True):
                shown = cell.value if cell.value is not None else "" if cell.text == MISSING else _no_formula(cell.text)
                line.append(f"{shown:.10g}" if isinstance(shown, float) else shown)
                if has_std:
                    line += ["" if cell.std is None else f"{cell.std:.6g}", "" if cell.seeds is None else cell.seeds]
            writer.writerow(line)
        return out.getvalue()

    def markdown(self) -> str:
        text = f"### {_no_markup(self.title)}\n\n" + (f"Paper: {self.source}.\n\n" if self.source else "")
        notes = "".join(f"\n{_no_markup(note)}\n" for note in self.notes)
        return text + markdown_rows(self.columns, self.rows) + notes


def markdown_rows(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> str:
    lines = [
        [column.full for column in columns],
        ["---:" if column.numeric else "---" for column in columns],
        *([cell.text for cell in row] for row in rows),
    ]
    return "".join("| " + " | ".join(map(_no_markup, line)) + " |\n" for line in lines)


def _no_formula(text: str) -> str:
    """Text for CSV that a spreadsheet does not compute."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _no_markup(text: str) -> str:
    """Text for Markdown, with its bars, tags and links as they are."""
    text = text.replace("\\", "\\\\").replace("|", "\\|").replace("](", "]\\(")
    return re.sub(r"<(?=[A-Za-z/!?])", r"\\<", text)


def number(value: float, digits: int | None = None) -> str:
    """A number with so many decimals; None: as many as suit it."""
    if math.isinf(value):
        return "∞"
    if digits is None:
        digits = 0 if value == round(value) else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}".replace("-", "−")


def text(value: str) -> Cell:
    return Cell(value or MISSING)


def plain(value: float | None, digits: int | None = None) -> Cell:
    if value is None or math.isnan(value):
        return Cell()
    return Cell(number(value, digits), value)


def stat(value: Stat, digits: int | None = None, scale: float = 1.0, unit: str = "") -> Cell:
    """Mean ± standard deviation, which is left out where it would print as zero; "(3 of 5)" where only some runs have
    it, "> rounds" for a level never reached."""
    if value.mean is None:
        if value.beyond is None:
            return Cell()
        return Cell(f"> {value.beyond:,}", None, None, value.of, math.inf, "not reached in so many rounds")
    mean, std = value.mean * scale, None if value.std is None else value.std * scale
    varies = len(set(value.values)) > 1
    if digits is None and varies:
        digits = 1
    shown = number(mean, digits)
    if std is not None and varies and round(std, digits) > 0:
        shown += f" ± {number(std, digits)}"
    shown += f" {unit}" if unit else ""
    partial = len(value.values) < value.of
    if partial:
        shown += f" ({len(value.values)} of {value.of})"
    hint = f"{len(value.values)} of {value.of} runs" + (", the others never reached it" if value.beyond else "")
    return Cell(shown, mean, std, len(value.values), None, hint)


def seconds(value: Stat) -> Cell:
    """Seconds to the millisecond, less than ten with two significant digits; the unit is in the header."""
    if value.mean is None or value.mean < SHORTEST:
        return stat(value, 0)
    return stat(value, max(3, 1 - math.floor(math.log10(value.mean))))


def size(value: Stat) -> Cell:
    """Bytes in a suitable unit; the number behind the text is in bytes."""
    if value.mean is None:
        return stat(value)
    power = min(4, int(math.log(max(value.mean, 1), 1000)))
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return _in_unit(value, 0 if power == 0 else 2, 1000.0**power, unit)


def duration(value: Stat) -> Cell:
    """Seconds in a suitable unit; the number behind the text is in seconds."""
    if value.mean is None:
        return stat(value)
    unit, length = time_unit(value.mean)
    shown = value.mean / length
    return _in_unit(value, 0 if unit == "s" and shown >= 10 else 1 if shown >= 1 else 3, length, unit)


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a time is easy to read, and its length in seconds."""
    return ("s", 1.0) if seconds < 120 else ("min", 60.0) if seconds < 7200 else ("h", 3600.0)


def _in_unit(value: Stat, digits: int, length: float, unit: str) -> Cell:
    return stat(value, digits, 1 / length, unit)._replace(value=value.mean, std=value.std)


def named(groups: Sequence[Group]) -> list[tuple[Group, list[Cell]]]:
    """Each group with the first cells of its row: the problem and its label."""
    rows = []
    for problem, members in by_problem(groups).items():
        rows += [(one, [Cell(problem), Cell(name)]) for one, name in zip(members, labels(members), strict=True)]
    return rows


HEAD = [Column("Data", numeric=False), Column("Method", numeric=False)]  # of the cells of ``named``


def decimals(value: float | None) -> int:
    """So many that a number has about five digits, with the four of a loss where it is near one."""
    if not value or not math.isfinite(value):
        return 4
    exponent = math.floor(math.log10(abs(value)))
    return max(0, 4 - exponent) if exponent >= 0 else min(10, 3 - exponent)


def metric_cell(value: Stat, metric: Metric, columns: Columns) -> Cell:
    """Of a metric in the units in which people read it."""
    return stat(value, 2 if metric.percent else 4 if columns == CLASSIFICATION else decimals(value.mean))


def objective_cell(value: Stat, columns: Columns) -> Cell:
    return metric_cell(value, columns.objective, columns)


def unit(metric: Metric) -> str:
    """The end of a heading."""
    return " %" * metric.percent


def heading(metric: Metric) -> str:
    """A metric's title as that of a table."""
    return metric.title[:1].upper() + metric.title[1:]


def per_objective(
    groups: Sequence[Group], name: str, make: Callable[[Metric, list[Group]], Table], empty: bool = True
) -> list[Table]:
    """A table for each objective, also an ``empty`` one; the first, or that of accuracies, has the name itself as its
    id."""
    found = by_objective(groups) or {ACCURACY: []}
    order = sorted(found, key=lambda objective: objective != ACCURACY)
    made = [(objective, make(objective, found[objective])) for objective in order]
    made = [(objective, table) for objective, table in made if empty or table.rows]
    taken: set[str] = set()
    for i, (objective, table) in enumerate(made):
        table.id = free_name(name if not i else f"{name}_{slug(objective.name)}", taken)
    return [table for _, table in made]


def free_name(name: str, taken: set[str]) -> str:
    """The name, with a number where it is taken."""
    names = chain([name], (f"{name}_{i}" for i in count(2)))
    free = next(each for each in names if each not in taken)
    taken.add(free)
    return free
