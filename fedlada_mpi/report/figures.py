"""Figures by matplotlib: PNG and SVG for a screen; for a paper also PDF, as wide as its columns, and the captions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from ..rundir.columns import DIAGNOSED, PHASES
from ..support.inputs import figure_text
from ..support.processes import process_map, usable_cores
from . import latex, paper, speedup
from .groups import Group, by_problem, labels, slug
from .measures import by_silo, evaluated_last
from .series import (
    LOGARITHMIC,
    LOOKS,
    MARKERS,
    MEASURES,
    ONE_PANEL,
    PERCENT,
    Look,
    finite_mean,
    looks,
    points,
    sequence,
    spent,
    thinned,
    with_silos,
)

_SCREEN: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e6ea",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.edgecolor": "#8a8f98",
    "lines.linewidth": 1.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedlada",
    "figure.dpi": 130,
}
_PAPER = {
    **_SCREEN,
    "font.size": 7.5,
    "axes.titlesize": 8,
    "figure.titlesize": 8,
    "legend.fontsize": 7,
    "lines.linewidth": 1.0,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,
    "figure.dpi": 300,
}


class Style(NamedTuple):
    """What figures are for; ``widths`` are those of a journal's column and of its text in inches."""

    rc: dict[Any, Any]
    widths: tuple[float, float] | None = None

    @property
    def formats(self) -> tuple[str, ...]:
        return ("png", "svg", "pdf", "tex") if self.widths else ("png", "svg")


STYLES = {"screen": Style({**_SCREEN, "lines.markersize": 4.5}), "paper": Style(_PAPER, (3.4, 7.0))}
POINTS = 300  # of a curve
MARKS = 8  # on a curve
WORTH_A_PROCESS = 2  # figures; fewer are drawn before another process has started
SINGLE_LINES = 5  # seeds; of more, a figure shows only the mean and the standard deviation
BELOW_THE_LOWEST = 10  # points of accuracy that a panel shows below its lowest end of a curve
PHASE_COLOURS = ("#33a9dd", "#d9400f", "#0077bb", "#e6a700", "#7f8791")

# A figure's name and the function that draws it.
Planned = tuple[str, Callable[[Style], Drawing]]


def write(groups: Sequence[Group], folder: Path, style: str = "screen") -> list[str]:
    """Draw every figure that there are runs for; returns the names of the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    planned = plan(groups)
    workers = min(usable_cores(), len(planned) // WORTH_A_PROCESS)
    list(process_map(partial(_write, folder, STYLES[style]), planned, workers))
    return [name for name, _ in planned]


def _write(folder: Path, style: Style, planned: Planned) -> None:
    name, draw = planned
    with plt.rc_context(style.rc):
        drawing = draw(style)
        if style.widths:
            caption = drawing.get_suptitle().replace(r"\$", "$")
            (folder / f"{name}.tex").write_text(
                latex.figure(name, caption, drawing.get_figwidth() > style.widths[0]), "utf-8"
            )
            drawing.suptitle("")
        # The canvases' own methods: savefig would draw everything twice.
        FigureCanvasAgg(drawing).print_png(folder / f"{name}.png")
        drawing.set_layout_engine("none")
        FigureCanvasSVG(drawing).print_svg(folder / f"{name}.svg", metadata={"Date": None})
        if style.widths:
            FigureCanvasPdf(drawing).print_pdf(folder / f"{name}.pdf", metadata={"CreationDate": None})
        plt.close(drawing)


def _panels(
    style: Style, rows: int, columns: int, width: float, height: float, more: float = 0.0, **options: Any
) -> tuple[Drawing, Any]:
    """Panels that are so wide and high on a screen, in inches, with ``more`` for what is above and below all of them;
    on paper they share the width of a column, or of the text if there are several next to each other."""
    if style.widths:
        column, text = style.widths
        whole = column if columns == 1 and width < column * 2 else text
        width, height = whole / columns, height * min(1.0, whole / columns / width)
    size = (width * columns, height * rows + more)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def plan(groups: Sequence[Group]) -> list[Planned]:
    """The figures that there are runs for."""
    planned: list[Planned] = []
    for problem, members in by_problem([one for one in groups if one.done]).items():
        name, problem = slug(problem), figure_text(problem, 100)
        apart: tuple[str, ...] = ()  # measures with a figure of their own
        if len(members) <= ONE_PANEL:
            planned.append((f"curves_{name}", partial(_curves, problem, members)))
        else:
            apart += ("test_acc", "train_loss", "consistency", "client_test_acc_worst_decile")
        diagnosed = [one for one in members if any(len(one.curve(measure)[0]) for measure in DIAGNOSED)]
        if len(diagnosed) > ONE_PANEL:
            apart += DIAGNOSED
        elif diagnosed:
            planned.append((f"diagnostics_{name}", partial(_diagnostics, problem, diagnosed)))
        for measure in apart:
            known = [one for one in members if len(one.curve(measure)[0])]
            if known:
                planned.append((f"{measure}_{name}", partial(_facets, problem, known, measure)))
        if len(members) <= ONE_PANEL and any(len(one.curve("client_test_acc_mean")[0]) for one in members):
            planned.append((f"clients_{name}", partial(_clients, problem, members)))
        if apart_by_silo := with_silos(members):
            planned.append((f"silos_{name}", partial(_silos, problem, apart_by_silo)))
        if any(np.nansum(one.curve("seconds_total")[1]) for one in members):
            planned.append((f"phases_{name}", partial(_phases, problem, members)))
        ranked = [one for one in members if any(len(run.by_rank.get("wait", ())) > 1 for run in one.runs)]
        if ranked and len(ranked) <= ONE_PANEL:
            planned.append((f"ranks_{name}", partial(_ranks, problem, ranked)))
    planned += [(grid.name, partial(_speedup, grid)) for grid in speedup.grids(groups)]
    # The smallest figures come last, so that all processes end at about the same time.
    planned += [(f"paper_{spec.id}", partial(_paper, spec)) for spec in paper.figures(groups) if not spec.empty]
    return planned


def _names(groups: Sequence[Group]) -> list[str]:
    return [figure_text(name) for name in labels(groups)]


def _line(look: Look, count: int, solid: bool = False) -> dict[str, Any]:
    """How matplotlib draws a curve of so many points in that look."""
    every = max(1, count // MARKS)
    first = LOOKS.index(look) % len(MARKERS) * every // len(MARKERS)  # so that markers of near curves do not coincide
    dash = "solid" if solid or not look.dash or count == 1 else (0, look.dash)
    return {"color": look.colour, "linestyle": dash, "marker": look.marker, "markevery": (min(first, count - 1), every)}


def _curve(axes: Axes, one: Group, measure: str, look: Look, name: str, x: str = "", limit: int | None = None) -> None:
    rounds, mean, std, _ = points(one, measure, POINTS, limit)
    if not len(rounds):
        return
    across = spent(one, x, rounds) if x else rounds
    axes.plot(across, mean, label=name, **_line(look, len(rounds)))
    colour = look.colour
    if not np.isnan(std).all():
        axes.fill_between(across, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)
        if not x and len(one.runs) <= SINGLE_LINES:
            scale = 100.0 if measure in PERCENT else 1.0
            for run in one.runs:
                known = ~np.isnan(run.series[measure]) & (run.rounds <= (run.done if limit is None else limit))
                shown = np.flatnonzero(known)[thinned(int(known.sum()), POINTS)]
                values = scale * run.series[measure][shown]
                axes.plot(run.rounds[shown], values, color=colour, linewidth=0.5, alpha=0.5)


def _axis(axes: Axes, measure: str, x: str = "Round") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(MEASURES[measure])
    if measure in LOGARITHMIC and any((np.asarray(line.get_ydata()) > 0).any() for line in axes.lines):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.01)
    axes.set_xlim(left=0)


def _legend_below(drawing: Drawing, panels: Iterable[Axes]) -> None:
    handles = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        size = 1.0 if plt.rcParams["font.size"] > 8 else 0.8
        inches = size * (0.8 + 0.075 * max(map(len, handles)))
        columns = max(1, min(len(handles), int(drawing.get_figwidth() / inches)))
        drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, handlelength=3.2)


def _paper(spec: paper.Figure, style: Style) -> Drawing:
    panels = [panel for panel in spec.panels if panel.groups]
    columns = 3 if len(panels) == 6 else min(2, len(panels))
    rows = -(-len(panels) // columns)
    drawing, grid = _panels(style, rows, columns, 3.9, 2.9, 0.7)
    marked = False
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid.flat, panels, strict=False):
        names = _names(panel.groups)
        points_of = paper.marks(panel.dataset) if panel.marked and panel.measure == "test_acc" else {}
        for one, name, look in zip(panel.groups, names, looks(panel.groups), strict=True):
            _curve(axes, one, panel.measure, look, name, limit=spec.rounds)
            for at in points_of.get(one.method, ()):
                if at[0] <= max(g.done for g in panel.groups):
                    axes.plot(*at, marker="x", markersize=5, markeredgewidth=1.4, color=look.colour, clip_on=False)
                    marked = True
        axes.set_title(panel.title)
        _axis(axes, panel.measure)
        if panel.measure in PERCENT:
            # The first rounds would take most of the height; what counts is where curves end, and the paper's values.
            ends = [float(values[-1]) for line in axes.lines if len(values := np.asarray(line.get_ydata()))]
            axes.set_ylim(bottom=max(0, min(ends, default=0) - BELOW_THE_LOWEST))
    drawing.suptitle(spec.title + ("   (× as the paper prints)" if marked else ""))
    _legend_below(drawing, grid.flat)
    return drawing


def _curves(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """One panel per measure, all groups in each."""
    names = _names(groups)
    wanted = [("test_acc", ""), ("train_loss", ""), ("test_acc", "units"), ("consistency", "")]
    wanted = [w for w in wanted if any(len(one.curve(w[0])[0]) for one in groups)]
    columns = min(2, len(wanted)) or 1
    rows = -(-len(wanted) // columns) or 1
    drawing, grid = _panels(style, rows, columns, 4.6, 3.1, 0.6)
    for axes, (measure, x) in zip(grid.flat, wanted, strict=False):
        for one, name, look in zip(groups, names, looks(groups), strict=True):
            _curve(axes, one, measure, look, name, x)
        _axis(axes, measure, "Communication, vectors of the model per participant (Nd)" if x else "Round")
    for axes in list(grid.flat)[len(wanted) :]:
        axes.set_axis_off()
    drawing.suptitle(problem + _seeds(groups))
    _legend_below(drawing, grid.flat)
    return drawing


def _clients(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """The clients' accuracies: over the rounds, and how they are distributed in the end."""
    parts = [p for p in ("test", "train") if any(len(one.curve(f"client_{p}_acc_mean")[0]) for one in groups)]
    drawing, grid = _panels(style, len(parts), 2, 4.6, 3.1, 0.6)
    for (left, right), part in zip(grid, parts, strict=True):
        for one, name, look in zip(groups, _names(groups), looks(groups), strict=True):
            colour = look.colour
            curves = (points(one, f"client_{part}_acc_{what}", POINTS) for what in ("mean", "std", "worst_decile"))
            (across, mean, *_), (_, spread, *_), (worst_across, worst, *_) = curves
            if not len(across):
                continue
            left.plot(across, mean, label=name, **_line(look, len(across), solid=True))
            left.plot(worst_across, worst, color=colour, linestyle="--", marker="." if len(across) == 1 else None)
            if len(spread) == len(mean):
                low, high = np.maximum(mean - spread, 0), np.minimum(mean + spread, 100)
                left.fill_between(across, low, high, color=colour, alpha=0.13, linewidth=0)
            known = [100 * run.clients[f"{part}_acc"] for run in evaluated_last(one.runs)]
            values = np.sort(np.concatenate([np.empty(0), *known]))
            values = values[np.isfinite(values)]
            if len(values):
                right.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=colour, label=name)
        left.set(xlabel="Round", ylabel=f"Clients' {part} accuracy (%)")
        left.margins(x=0.01)
        left.set_xlim(left=0)
        right.set(xlabel=f"{part.capitalize()} accuracy after the last evaluation (%)", ylabel="Clients at or below it")
    grid[0, 0].set_title("mean ± standard deviation; dashed: worst tenth")
    grid[0, 1].set_title("distribution over the clients")
    drawing.suptitle(f"{problem}: client by client")
    _legend_below(drawing, grid.flat)
    return drawing


def _silos(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """Accuracy and loss of each silo after the last evaluation, the mean of the seeds and their standard deviation."""
    drawing, grid = _panels(style, 2, 2, 4.6, 2.6, 0.6)
    known = [(one, name, look) for one, name, look in zip(groups, _names(groups), looks(groups), strict=True)]
    for place, (one, name, look) in enumerate(known):
        values = by_silo(one.runs)
        # Next to each other, so that equal values do not hide each other.
        across = values["silos"] + 0.6 * ((place + 0.5) / len(known) - 0.5)
        for axes, measure in zip(grid.flat, ("test_acc", "train_acc", "test_loss", "train_loss"), strict=True):
            each = values[measure] * (100.0 if measure in PERCENT else 1.0)
            spread = each.std(axis=0, ddof=1) if len(each) > 1 else None
            drawn: Any = {"color": look.colour, "marker": look.marker, "linestyle": "none", "label": name}
            axes.errorbar(across, each.mean(axis=0), spread, elinewidth=0.8, capsize=2, **drawn)
            axes.set(xlabel="Silo", ylabel=MEASURES[measure])
            axes.xaxis.get_major_locator().set_params(integer=True)
    drawing.suptitle(f"{problem}: silo by silo, after the last evaluation" + _seeds(groups))
    _legend_below(drawing, grid.flat)
    return drawing


def _diagnostics(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """One panel per number of --diagnose; the gradient at z is in that of the gradient at x."""
    known = [measure for measure in DIAGNOSED if any(len(one.curve(measure)[0]) for one in groups)]
    panels = [measure for measure in known if measure != "gradient_norm_z"]
    columns = min(3, len(panels))
    drawing, grid = _panels(style, -(-len(panels) // columns), columns, 4.2, 3.1, 0.6)
    for axes, measure in zip(grid.flat, panels, strict=False):
        for one, name, look in zip(groups, _names(groups), looks(groups), strict=True):
            _curve(axes, one, measure, look, name)
            if measure == "gradient_norm":
                across, mean, *_ = points(one, "gradient_norm_z", POINTS)
                axes.plot(across, mean, color=look.colour, linestyle=":", linewidth=0.9)
        _axis(axes, measure)
        if measure == "gradient_norm":
            axes.set_title("thin and dotted: at z")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    drawing.suptitle(f"{problem}: diagnostics" + _seeds(groups))
    _legend_below(drawing, grid.flat)
    return drawing


def _speedup(grid: speedup.Grid, style: Style) -> Drawing:
    """Rounds to a training loss against S K, one panel per level."""
    drawing, panels = _panels(style, 1, len(grid.levels), 4.4, 3.6, 0.5)
    every_k = sorted({point.k for point in grid.points})
    for axes, level in zip(panels.flat, grid.levels, strict=True):
        for k, look in zip(every_k, sequence(len(every_k)), strict=True):
            known = [(p, p.rounds[level]) for p in grid.points if p.k == k and p.mean(level) is not None]
            across = [p.product for p, _ in known]
            means, stds = [stat.mean for _, stat in known], [stat.std or 0.0 for _, stat in known]
            dash = (0, look.dash) if look.dash else "solid"
            drawn: Any = {"color": look.colour, "linestyle": dash, "marker": look.marker}
            axes.errorbar(across, means, stds, capsize=2, label=f"K = {k}", **drawn)
        if (first := grid.first(level)) is not None:
            products = np.array([first.product, grid.points[-1].product])
            ideal = (first.mean(level) or np.nan) * first.product / products
            axes.plot(products, ideal, color="#8a8f98", linestyle="--", zorder=1, label="ideal, 1 / (S K)")
        axes.set(xscale="log", yscale="log", xlabel="S K, local steps of a round", title=f"training loss {level:g}")
        axes.set_xticks(sorted({point.product for point in grid.points}))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", which="minor", bottom=False)
    panels[0, 0].set_ylabel("Rounds")
    drawing.suptitle(
        f"{figure_text(grid.title, 100)}: linear speed-up" + _seeds([p.one for p in grid.points]), fontsize=11
    )
    _legend_below(drawing, panels.flat)
    return drawing


def _seeds(groups: Sequence[Group]) -> str:
    """The end of a title: over how many seeds its curves are."""
    counts = sorted({len(one.runs) for one in groups})
    if counts == [1]:
        return ""
    many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    common = ", over the rounds that all have" if any(one.uneven for one in groups) else ""
    return f", mean ± standard deviation of {many} seeds{common}"


def _facets(problem: str, groups: Sequence[Group], measure: str, style: Style) -> Drawing:
    """One panel per method, the other methods' curves behind it in grey."""
    names = _names(groups)
    named = dict(zip(map(id, groups), names, strict=True))
    facets: list[list[Group]] = []
    for method in dict.fromkeys(one.method for one in groups):
        same_method = [one for one in groups if one.method == method]
        each = -(-len(same_method) // -(-len(same_method) // 8))
        facets += [same_method[i : i + each] for i in range(0, len(same_method), each)]
    columns = min(3, len(facets))
    rows = -(-len(facets) // columns)
    drawing, grid = _panels(style, rows, columns, 4.2, 3.4, sharex=True, sharey=True)
    for axes, shown in zip(grid.flat, facets, strict=False):
        others = [one for one in groups if all(one is not s for s in shown)]
        behind = [np.column_stack(points(one, measure, 100)[:2]) for one in others]
        axes.add_collection(LineCollection(behind, colors="#d9dce1", linewidths=0.6, zorder=1), autolim=False)
        for one, look in zip(shown, looks(shown), strict=True):
            _curve(axes, one, measure, look, named[id(one)])
        _axis(axes, measure)
        corner = "lower right" if measure in PERCENT else "upper right"
        axes.legend(fontsize=7 if style.widths is None else 5.5, loc=corner, handlelength=2.6, labelspacing=0.3)
    for axes in list(grid.flat)[len(facets) :]:
        axes.set_axis_off()
    drawing.suptitle(f"{problem}: {MEASURES[measure]}")
    return drawing


def _phases(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """Seconds per round by phase, one bar per group."""
    means = [[finite_mean(one.curve(f"seconds_{phase}")[1]) or 0.0 for phase in PHASES] for one in groups]
    names = _names(groups)
    drawing, grid = _panels(style, 1, 1, 8.4, 0.28 * len(groups) + 0.5, 1.0)
    axes = grid[0, 0]
    left = np.zeros(len(groups))
    for phase, colour, values in zip(PHASES, PHASE_COLOURS, np.array(means).T, strict=True):
        axes.barh(names, values, left=left, color=colour, label=phase, height=0.7)
        left += values
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("Seconds per round (slowest rank of each phase; evaluation may overlap the next round)")
    drawing.suptitle(f"{problem}: where the time goes")
    axes.margins(y=0.01)
    _legend_below(drawing, [axes])
    return drawing


def _ranks(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """Seconds of training and waiting by rank, in the last run of each group."""
    names = _names(groups)
    columns = min(4, len(groups))
    rows = -(-len(groups) // columns)
    drawing, grid = _panels(style, rows, columns, 2.9, 2.2, 0.5, sharey=True)
    for axes, one, name in zip(grid.flat, groups, names, strict=False):
        last = (
            one.runs[-1].by_rank if "wait" in one.runs[-1].by_rank else next(r.by_rank for r in one.runs if r.by_rank)
        )
        ranks = np.arange(len(last["wait"]))
        train = last.get("train", np.zeros(len(ranks)))
        axes.bar(ranks, train, color=PHASE_COLOURS[1], label="training")
        axes.bar(ranks, last["wait"], bottom=train, color="#c9ced6", label="waiting")
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("Rank")
        axes.grid(axis="x", visible=False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in list(grid.flat)[len(groups) :]:
        axes.set_axis_off()
    grid[0, 0].set_ylabel("Seconds per round")
    drawing.suptitle(f"{problem}: training and waiting by rank")
    _legend_below(drawing, grid.flat)
    return drawing
