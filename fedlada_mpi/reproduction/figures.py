"""The paper's figures: which of our runs are in them, and how they are drawn; and those of the linear speed-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from ..analysis.drawing import Planned, Style, axis, curve, legend_below, over_seeds, panels, stroke
from ..analysis.groups import Group, dataset_name, method_name, show
from ..analysis.series import Panel, quantities, sequence, series
from ..support.inputs import figure_text
from . import paper, regime, speedup

MARKED = "all_methods"  # the figure with the values that the paper prints
BELOW_THE_LOWEST = 10  # points of accuracy that a panel shows below its lowest end of a curve


@dataclass
class Figure:
    """A figure of the paper with the groups that there are for it, and the names of those that are missing."""

    id: str
    title: str
    source: str
    panels: list[Panel]
    missing: list[str]

    @property
    def name(self) -> str:
        """That of its files."""
        return f"paper_{self.id}"

    @property
    def empty(self) -> bool:
        return not any(panel.series for panel in self.panels)


def figures(groups: Sequence[Group]) -> list[Figure]:
    """All figures of the paper."""
    return [_figure(spec, groups) for spec in paper.contents()["figures"]]


def _figure(spec: Mapping[str, Any], groups: Sequence[Group]) -> Figure:
    found, missing = [], []
    for panel in spec["panels"]:
        available = []
        for each in spec["series"]:
            wanted = {**panel["where"], **each}
            one, _ = paper.match(groups, wanted)
            if one is not None and one.done:
                available.append(one)
            else:
                missing.append(_in_words(wanted))
        dataset, measure = panel["where"]["dataset"], panel["measure"]
        title = " ".join([dataset_name(dataset), *([panel["title"]] if "title" in panel else [])])
        published = paper.published(dataset) if spec["id"] == MARKED and measure == "test_acc" else {}
        found.append(Panel(title, measure, spec["rounds"], series(available), published))
    return Figure(spec["id"], spec["title"], spec["source"], found, list(dict.fromkeys(missing)))


def _in_words(wanted: Mapping[str, Any]) -> str:
    """A missing run."""
    rest = [show(n, v) for n, v in wanted.items() if n not in ("dataset", "algorithm")]
    return " ".join([dataset_name(wanted["dataset"]), method_name(wanted["algorithm"]), *rest])


def plan(found: Sequence[Figure], groups: Sequence[Group]) -> list[Planned]:
    """Those of the paper's figures that there are runs for, and the speed-ups."""
    # The smallest figures come last, so that all processes end at about the same time.
    cells = regime.records(groups)
    return [
        *([("regime", partial(_draw_regime, cells))] if cells else []),
        *((grid.name, partial(_draw_speedup, grid)) for grid in speedup.grids(groups)),
        *((figure.name, partial(_draw, figure)) for figure in found if not figure.empty),
    ]


def _draw(figure: Figure, style: Style) -> Drawing:
    shown = [panel for panel in figure.panels if panel.series]
    drawing, grid = panels(style, len(shown), 3 if len(shown) == 6 else 2, 3.9, 2.9, 0.7)
    marked = False
    for axes, panel in zip(grid, shown, strict=True):
        for each in panel.series:
            curve(axes, each, panel.measure, limit=panel.rounds)
            for at in panel.published.get(each.group.method, ()):
                if at[0] <= panel.done:
                    axes.plot(*at, marker="x", markersize=5, markeredgewidth=1.4, color=each.look.colour, clip_on=False)
                    marked = True
        axes.set_title(panel.title)
        axis(axes, panel.measure)
        if quantities()[panel.measure].percent:
            # The first rounds would take most of the height; what counts is where curves end, and the paper's values.
            ends = [float(values[-1]) for line in axes.lines if len(values := np.asarray(line.get_ydata()))]
            axes.set_ylim(bottom=max(0, min(ends, default=0) - BELOW_THE_LOWEST))
    drawing.suptitle(figure.title + ("   (× as the paper prints)" if marked else ""))
    legend_below(drawing, grid)
    return drawing


def _draw_speedup(grid: speedup.SpeedupGrid, style: Style) -> Drawing:
    """Rounds to a training loss against S K, one panel per level."""
    drawing, shown = panels(style, len(grid.levels), len(grid.levels), 4.4, 3.6, 0.5)
    every_k = sorted({point.k for point in grid.points})
    for axes, level in zip(shown, grid.levels, strict=True):
        for k, look in zip(every_k, sequence(len(every_k)), strict=True):
            known = [(p, mean) for p in grid.points if p.k == k and (mean := p.mean(level)) is not None]
            across, means = [p.product for p, _ in known], [mean for _, mean in known]
            stds = [p.rounds[level].std or 0.0 for p, _ in known]
            axes.errorbar(across, means, stds, capsize=2, label=f"K = {k}", **stroke(look))
        if (first := grid.first(level)) is not None:
            products = np.array([first.product, grid.points[-1].product])
            ideal = (first.mean(level) or np.nan) * first.product / products
            axes.plot(products, ideal, color="#8a8f98", linestyle="--", zorder=1, label="ideal, 1 / (S K)")
        axes.set(xscale="log", yscale="log", xlabel="S K, local steps of a round", title=f"training loss {level:g}")
        axes.set_xticks(sorted({point.product for point in grid.points}))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for ticks in (axes.xaxis, axes.yaxis):
            ticks.set_major_formatter(ScalarFormatter())
            ticks.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", which="minor", bottom=False)
    shown[0].set_ylabel("Rounds")
    drawing.suptitle(
        f"{figure_text(grid.title, 100)}: linear speed-up" + over_seeds([p.one for p in grid.points]), fontsize=11
    )
    legend_below(drawing, shown)
    return drawing


def _draw_regime(cells: Sequence[Mapping[str, Any]], style: Style) -> Drawing:
    """|grad F(z)|^2 against K for every S, over all rounds and over the second half; and against T."""
    drawing, shown = panels(style, len(regime.PROBLEMS) + 1, 2, 4.4, 3.2, 0.5)
    dashes = dict(zip(regime.PARTS, ("-", ":"), strict=True))
    for axes, problem in zip(shown, regime.PROBLEMS, strict=False):
        grid, _ = regime.split(cells, problem.name)
        for s, look in zip(regime.EVERY_S, sequence(len(regime.EVERY_S)), strict=True):
            own = [cell for cell in grid if cell["s"] == s]
            for part, dash in dashes.items():
                name = f"S = {s}" if part == "all" else None
                _means(axes, own, "k", part, label=name, **{**stroke(look), "linestyle": dash})
        axes.set(title=problem.name, xlabel="K, local steps of a round")
        _on_powers(axes, regime.EVERY_K)
    for problem, look in zip(regime.PROBLEMS, sequence(len(regime.PROBLEMS)), strict=True):
        _, lengths = regime.split(cells, problem.name)
        for part, dash in dashes.items():
            ordered = sorted(lengths, key=lambda cell: cell["t"])
            style_of = {**stroke(look), "linestyle": dash}
            _means(shown[-1], ordered, "t", part, label=problem.name if part == "all" else None, **style_of)
    shown[-1].set(title=f"S = K = {regime.S_AND_K}", xlabel="T, rounds")
    _on_powers(shown[-1], regime.EVERY_T)
    shown[-1].legend(fontsize=7, frameon=False)
    for axes in shown[::2]:
        axes.set_ylabel("mean of |∇F(z)|²")
    drawing.suptitle("Inside the theorem's regime (dotted: second half of the rounds)", fontsize=11)
    legend_below(drawing, shown[:1])
    return drawing


def _means(axes: Any, cells: Sequence[Mapping[str, Any]], across: str, part: str, **look: Any) -> None:
    values = np.array([cell[part] for cell in cells])
    axes.errorbar([cell[across] for cell in cells], values.mean(1), values.std(1, ddof=1), capsize=2, **look)


def _on_powers(axes: Any, ticks: Sequence[int]) -> None:
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", bottom=False)
