"""Heat maps of two swept settings: the final value of the objective over both, whatever draws it.

``tables`` has the maps as tables, ``figures.py`` draws them by matplotlib, ``page.py`` passes them on to Plotly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..rundir.columns import Metric
from . import measures
from .groups import Group, Stat, dataset_name, show, slug
from .series import of_part
from .setups import in_words, setting_name
from .tables import Cell, Column, Table, free_name, objective_cell

# From low to high: one hue, and lightness alone tells the values apart, in grey and for colour-blind readers as well.
COLOURS = ("#f1f6fb", "#c3dcf0", "#82b8de", "#3f86c0", "#14518f", "#062a54")
INKS = "#1d2127", "#ffffff"  # of text on light and on dark colours
DARK_FROM = 0.62  # of the range; both inks have a contrast of 4 there


@dataclass
class HeatMap:
    """Groups that differ in two settings alone, by the values of both; None where a cell was not run."""

    x: str
    y: str
    columns: list[Any]
    rows: list[Any]
    cells: list[list[Group | None]]
    rest: dict[str, Any]  # other settings, where several maps of one method differ in them
    mark: str = ""  # where methods of one name have maps
    name: str = ""  # that of its files

    @cached_property
    def groups(self) -> list[Group]:
        return [one for row in self.cells for one in row if one is not None]

    @property
    def heading(self) -> str:
        first = self.groups[0]
        rest = " ".join(show(name, value) for name, value in self.rest.items())
        return ", ".join(filter(None, [dataset_name(first.dataset), first.method_name, self.mark, rest]))

    @property
    def title(self) -> str:
        return f"{self.heading}: {self.y_name} and {self.x_name}"

    @property
    def slug(self) -> str:
        first, rest = self.groups[0], (f"{name} {value}" for name, value in self.rest.items())
        return f"sweep_{slug(' '.join([first.dataset, first.method_name, self.mark, *rest, self.y, self.x]))}"

    @property
    def x_name(self) -> str:
        return setting_name(self.x)

    @property
    def y_name(self) -> str:
        return setting_name(self.y)

    @property
    def objective(self) -> Metric:
        return self.groups[0].columns.objective

    @cached_property
    def part(self) -> str:
        """The test data; the validation data where there is any, as a sweep is there to choose settings."""
        return "val" if all(one.validated for one in self.groups) else "test"

    @property
    def value_name(self) -> str:
        return f"Final {of_part(self.objective, self.part).within}"

    @cached_property
    def stats(self) -> list[list[Stat]]:
        """The values over seeds, shares in per cent."""
        final = measures.final(self.objective.of(self.part), self.objective.scale)
        return [[Stat() if one is None else one.latest(final) for one in row] for row in self.cells]

    @property
    def means(self) -> list[list[float | None]]:
        return [[each.mean for each in row] for row in self.stats]

    @property
    def extent(self) -> tuple[float, float]:
        known = [mean for row in self.means for mean in row if mean is not None]
        return min(known), max(known)

    @property
    def best(self) -> float:
        """The best mean."""
        return self.extent[self.objective.larger_is_better]

    def short(self, mean: float) -> str:
        """A mean as it is written into its cell."""
        return f"{mean:.1f}" if self.objective.percent else f"{mean:.3g}"

    def cell(self, each: Stat) -> Cell:
        return objective_cell(each, self.groups[0].columns)

    def share(self, value: float) -> float:
        """Where a value is between the lowest and the highest."""
        low, high = self.extent
        return (value - low) / (high - low) if high > low else 0.5

    def ink(self, value: float, reverse: bool = False) -> str:
        """The colour of text on that of a value; ``reverse``: where the colours go from dark to light."""
        share = self.share(value)
        return INKS[int((1 - share if reverse else share) >= DARK_FROM)]

    @property
    def ticks(self) -> tuple[list[str], list[str]]:
        """The values of both settings as text."""
        return [in_words(self.x, v) for v in self.columns], [in_words(self.y, v) for v in self.rows]


def find(groups: Sequence[Group]) -> list[HeatMap]:
    """The maps among the groups: of each data set and method, over the two settings with the most values."""
    families: dict[tuple[Any, ...], list[Group]] = {}
    for one in groups:
        if one.validated or one.has(one.columns.objective.of("test")):
            families.setdefault((one.dataset, one.data, one.columns, one.method, one.code), []).append(one)
    found = [each for family in families.values() for each in _maps(family)]
    titles = [each.title for each in found]
    for each, text in zip(found, titles, strict=True):
        if titles.count(text) > 1:  # methods of one name, from other files or of other code
            alike = [other for other, same in zip(found, titles, strict=True) if same == text]
            objective = each.objective.title if len({other.objective for other in alike}) > 1 else ""
            first = each.groups[0]
            each.mark = " ".join(filter(None, [first.method, first.code, first.data, objective]))
    taken = set[str]()
    for each in found:
        each.name = free_name(each.slug, taken)
    return found


def _maps(family: Sequence[Group]) -> list[HeatMap]:
    names = [n for n in family[0].settings if n != "dataset" and all(n in one.settings for one in family)]
    counts = {n: count for n in names if (count := len({one.settings[n] for one in family})) > 1}
    if len(counts) < 2:
        return []
    # More columns than rows, as pages are wide.
    x, y, *others = sorted(counts, key=lambda n: -counts[n])
    by_rest: dict[tuple[Any, ...], list[Group]] = {}
    for one in family:
        by_rest.setdefault(tuple(one.settings[n] for n in others), []).append(one)
    found = []
    for rest, alike in by_rest.items():
        members = _crossed(alike, x, y)
        columns, rows = (_sorted(one.settings[n] for one in members) for n in (x, y))
        at = {(one.settings[y], one.settings[x]): one for one in members}
        if members:
            cells = [[at.get((row, column)) for column in columns] for row in rows]
            found.append(HeatMap(x, y, columns, rows, cells, dict(zip(others, rest, strict=True))))
    return found


def _crossed(groups: Sequence[Group], x: str, y: str) -> Sequence[Group]:
    """Without those that are alone in their row or column, and say nothing of the other setting: of settings that were
    varied one at a time none is left."""
    across, down = (Counter(one.settings[name] for one in groups) for name in (x, y))
    rest = [one for one in groups if across[one.settings[x]] > 1 and down[one.settings[y]] > 1]
    return rest if len(rest) == len(groups) else _crossed(rest, x, y)


def _sorted(values: Iterable[Any]) -> list[Any]:
    """Each value once: numbers by size, then names."""
    return sorted(set(values), key=lambda v: (isinstance(v, str), v))


def tables(groups: Sequence[Group]) -> list[Table]:
    return [_table(one) for one in find(groups)]


def _table(one: HeatMap) -> Table:
    across, down = one.ticks
    columns = [Column(one.y_name, numeric=False), *(Column(tick, one.x_name) for tick in across)]
    rows = []
    for i, (tick, stats) in enumerate(zip(down, one.stats, strict=True)):
        cells = [one.cell(each) for each in stats]
        cells = [cell._replace(tone="best") if cell.value == one.best else cell for cell in cells]
        rows.append([Cell(tick, sort=float(i)), *cells])
    most = "highest" if one.objective.larger_is_better else "lowest"
    notes = [f"{one.value_name}, mean ± standard deviation over seeds; bold: the {most}."]
    return Table(one.name, one.title, columns, rows, notes=notes, section="results", pictured=True)
