"""The linear speed-up of the paper's corollary: rounds to a training loss against S K, where runs vary both.

Rounds of a cell (S, K) are compared with those of the cell with the smallest S K: the speed-up is their quotient, and
ideally the quotient of the S K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..analysis import measures
from ..analysis.groups import Group, Stat, slug
from ..analysis.tables import Cell, Column, Table, free_name, plain, stat
from ..support import rng

# Settings in which the cells of a grid may differ: S, K, and the rates that the corollary gives for them.
VARIED = ("participation", "local_steps", "local_epochs", "lr", "server_lr")
LEVELS = (2.0, 1.5, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
SHOWN = 3  # levels
ENDS = 0.5  # of the ideal, below which a speed-up is no longer called linear


@dataclass
class Point:
    """A cell of the grid: S clients with K local steps in a round."""

    one: Group
    s: int
    k: int
    rounds: dict[float, Stat] = field(default_factory=dict)  # to a training loss

    @property
    def product(self) -> int:
        return self.s * self.k

    @property
    def in_regime(self) -> bool:
        """Whether K is as small as the theorem's rate needs, (T / S)^(1/3), and as large as its constant C > 0 does."""
        beta1 = self.one.settings.get("beta1", 0.0)
        return beta1 / (1 - beta1) < self.k <= (self.one.done / self.s) ** (1 / 3) + 1e-9

    def mean(self, level: float) -> float | None:
        """Rounds to the level, where all seeds reached it."""
        found = self.rounds[level]
        return found.mean if len(found.values) == found.of else None


@dataclass
class SpeedupGrid:
    """Cells that differ in S and K and the rates alone, by S K."""

    points: list[Point]
    name: str = ""  # that of its files

    @property
    def title(self) -> str:
        first = self.points[0].one
        return f"{first.problem}, {first.method_name}"

    @cached_property
    def levels(self) -> list[float]:
        """The lowest that at least half of the cells have reached."""
        reached = [
            level for level in LEVELS if 2 * sum(p.mean(level) is not None for p in self.points) >= len(self.points)
        ]
        return reached[-SHOWN:]

    def first(self, level: float) -> Point | None:
        """The cell that speed-ups are relative to."""
        return next((p for p in self.points if p.mean(level) is not None), None)

    def speedup(self, point: Point, level: float) -> tuple[float, float] | None:
        """The speed-up of a cell, and its share of the ideal one."""
        first, rounds = self.first(level), point.mean(level)
        if first is None or rounds is None:
            return None
        gained = (first.mean(level) or 0.0) / rounds
        return gained, gained * first.product / point.product

    def linear_until(self, level: float) -> int | None:
        """The S K up to which every cell, from the first one that reached the level, has its share of the ideal."""
        first, until = self.first(level), None
        compared = [p for p in self.points if first is not None and p.product >= first.product]
        for product in sorted({p.product for p in compared}):
            found = [self.speedup(p, level) for p in compared if p.product == product]
            if any(each is None or each[1] < ENDS for each in found):
                break
            until = product
        return until


def grids(groups: Sequence[Group]) -> list[SpeedupGrid]:
    """The grids among the groups: at least two S and two K."""
    families: dict[tuple[object, ...], list[Point]] = {}
    for one in groups:
        values = one.settings
        if one.done and values["local_steps"] and values["sampling"] == "fixed":
            key = (one.data, *((name, value) for name, value in values.items() if name not in VARIED))
            point = Point(one, rng.fixed_number(values["clients"], values["participation"]), values["local_steps"])
            point.rounds = {level: one.over(measures.rounds_to("train_loss", level)) for level in LEVELS}
            families.setdefault(key, []).append(point)
    found = [SpeedupGrid(sorted(points, key=lambda p: (p.product, p.s))) for points in families.values()]
    found = [g for g in found if len({p.s for p in g.points}) > 1 and len({p.k for p in g.points}) > 1 and g.levels]
    taken = set[str]()
    for grid in found:
        grid.name = free_name(f"speedup_{slug(grid.title)}", taken)
    return found


def tables(groups: Sequence[Group]) -> list[Table]:
    return [_table(grid) for grid in grids(groups)]


def _table(grid: SpeedupGrid) -> Table:
    columns = [*map(Column, ("S", "K", "S K", "η_l", "η_g"))]
    for level in grid.levels:
        columns += [Column(name, f"training loss {level:g}") for name in ("rounds", "speed-up", "% of ideal")]
    rows = []
    for point in grid.points:
        rates = (point.one.settings[name] for name in ("lr", "server_lr"))
        row = [plain(point.s), plain(point.k), plain(point.product), *(Cell(f"{rate:g}", rate) for rate in rates)]
        for level in grid.levels:
            gained, share = grid.speedup(point, level) or (None, None)
            row += [stat(point.rounds[level]), plain(gained, 1), plain(measures.percent(share), 0)]
        rows.append(row)
    notes = ["Rounds to the first evaluation at or below a training loss; ideal: rounds fall as 1 / (S K)."]
    for level in grid.levels:
        until = grid.linear_until(level)
        how_far = (
            f"at least {100 * ENDS:g} % of the ideal up to S K = {until:,}" if until else "not linear from the start"
        )
        notes.append(f"Training loss {level:g}: {how_far}.")
    inside = sum(point.in_regime for point in grid.points)
    notes.append(
        f"An observation, not a test of the theorem: {inside} of {len(grid.points)} cells have β₁ / (1 − β₁) < K ≤ "
        "(T / S)^(1/3), and the loss is that at x, not the mean of |∇F(z)|²."
    )
    title = f"Linear speed-up: {grid.title}"
    return Table(grid.name, title, columns, rows, notes=notes, section="diagnostics", pictured=True)
