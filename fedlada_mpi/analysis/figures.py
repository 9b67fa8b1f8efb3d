"""The figures of any set of runs: curves, clients, silos, diagnostics, phases, ranks and heat maps of sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Drawing

from ..rundir.columns import DIAGNOSED, LOSS
from ..support.inputs import figure_text
from . import sweeps
from .drawing import (
    POINTS,
    Planned,
    Style,
    axis,
    curve,
    drawn_series,
    fitting,
    from_zero,
    legend_below,
    lines,
    over_seeds,
    panels,
    spaced_markers,
    stroke,
    whole_numbers,
    within_percent,
)
from .groups import Group, labels, problems
from .series import (
    ONE_PANEL,
    PHASE_COLOURS,
    Series,
    looks,
    of_part,
    phase_bars,
    points,
    quantities,
    with_silos,
)
from .sites import by_silo, evaluated_last
from .sweeps import COLOURS, HeatMap


def plan(groups: Sequence[Group]) -> list[Planned]:
    """The figures that there are runs for."""
    planned: list[Planned] = []
    for title, name, members in problems([one for one in groups if one.done]):
        problem = figure_text(fitting([title], 90)[0], 90)
        columns = members[0].columns
        spread = columns.spread.values()
        apart: tuple[str, ...] = ()  # measures with a figure of their own
        if len(members) <= ONE_PANEL:
            planned.append((f"curves_{name}", partial(_curves, problem, members)))
        else:
            measures = (columns.objective.of("test"), LOSS.of("train"), "consistency", *(worst for *_, worst in spread))
            apart += tuple(dict.fromkeys(measures))
        diagnosed = [one for one in members if any(map(one.has, DIAGNOSED))]
        if len(diagnosed) > ONE_PANEL:
            apart += DIAGNOSED
        elif diagnosed:
            planned.append((f"diagnostics_{name}", partial(_diagnostics, problem, diagnosed)))
        for measure in apart:
            known = [one for one in members if one.has(measure)]
            if known:
                planned.append((f"{measure}_{name}", partial(_facets, problem, known, measure)))
        if len(members) <= ONE_PANEL and any(one.has(mean) for one in members for mean, *_ in spread):
            planned.append((f"clients_{name}", partial(_clients, problem, members)))
        if apart_by_silo := with_silos(members):
            planned.append((f"silos_{name}", partial(_silos, problem, apart_by_silo)))
        if any(np.nansum(one.curve("seconds_total").mean) for one in members):
            planned.append((f"phases_{name}", partial(_phases, problem, members)))
        ranked = [one for one in members if any(len(run.by_rank.get("wait", ())) > 1 for run in one.runs)]
        if ranked and len(ranked) <= ONE_PANEL:
            planned.append((f"ranks_{name}", partial(_ranks, problem, ranked)))
    return [*planned, *((one.name, partial(_heat_map, one)) for one in sweeps.find(groups))]


def _curves(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """One panel per measure, all groups in each."""
    columns = groups[0].columns
    tested = columns.objective.of("test")
    wanted = [(tested, ""), (LOSS.of("train"), ""), (tested, "units"), ("consistency", "")]
    wanted = [w for w in wanted if any(one.has(w[0]) for one in groups)]
    drawing, grid = panels(style, len(wanted), 2, 4.6, 3.1, 0.6)
    for axes, (measure, x) in zip(grid, wanted, strict=True):
        for each in drawn_series(groups):
            curve(axes, each, measure, x)
        across = "Communication, vectors of the model per participant (Nd)" if x else "Round"
        axis(axes, measure, across, columns)
    drawing.suptitle(problem + over_seeds(groups), wrap=True)
    legend_below(drawing, grid)
    return drawing


def _clients(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """The clients' objectives: over the rounds, and how they are distributed in the end."""
    columns = groups[0].columns
    objective = columns.objective
    unit = " (%)" * objective.percent
    parts = [part for part, (mean, *_) in columns.spread.items() if any(one.has(mean) for one in groups)]
    undefined = False
    drawing, grid = panels(style, 2 * len(parts), 2, 4.6, 3.1, 0.6)
    for left, right, part in zip(grid[::2], grid[1::2], parts, strict=True):
        for one, label, look in drawn_series(groups):
            name, colour = figure_text(label), look.colour
            shown = (points(one, measure, POINTS) for measure in columns.spread[part])
            (across, mean, _), (_, spread, _), worst = shown
            if not len(across):
                continue
            solid = {**stroke(look), "linestyle": "solid", "markevery": spaced_markers(look, len(across))}
            left.plot(across, mean, label=name, **solid)
            left.plot(worst.rounds, worst.y, color=colour, linestyle="--", marker="." if len(across) == 1 else None)
            if len(spread) == len(mean):
                low, high = mean - spread, mean + spread
                if objective.percent:
                    low, high = np.maximum(low, 0), np.minimum(high, 100)
                left.fill_between(across, low, high, color=colour, alpha=0.13, linewidth=0)
            last = [run.clients for run in evaluated_last(one.runs) if objective.of(part) in run.clients]
            everyone = np.concatenate([np.empty(0), *(objective.scale * each[objective.of(part)] for each in last)])
            values = np.sort(everyone[np.isfinite(everyone)])
            undefined |= len(values) < len(everyone)
            if len(values):
                right.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=colour, label=name)
        title = objective.title
        left.set(xlabel="Round", ylabel=lines(f"Clients' {part} {title}{unit}", left.bbox.height, drawing))
        if objective.percent:
            within_percent(left)
        from_zero(left)
        across_title = f"{part.capitalize()} {title} after the last evaluation{unit}"
        right.set(xlabel=lines(across_title, right.bbox.width, drawing), ylabel="Clients at or below it")
    grid[0].set_title("mean ± standard deviation; dashed: worst tenth")
    grid[1].set_title("distribution over the clients" + " that have a value" * undefined)
    drawing.suptitle(f"{problem}: client by client", wrap=True)
    legend_below(drawing, grid)
    return drawing


def _silos(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """Objective and loss of each silo after the last evaluation, the mean of the seeds and their standard deviation."""
    found = [(each, silos) for each in drawn_series(groups) if (silos := by_silo(each.group.runs)) is not None]
    metrics = dict.fromkeys((groups[0].columns.objective, LOSS))
    measures = [(metric, part) for metric in metrics for part in ("test", "train")]
    measures = [(metric, part) for metric, part in measures if any(metric.of(part) in s.values for _, s in found)]
    drawing, grid = panels(style, len(measures), 2, 4.6, 2.6, 0.6)
    names = {int(number): name for _, silos in found for number, name in zip(silos.numbers, silos.names, strict=True)}
    for place, ((_, label, look), silos) in enumerate(found):
        # Next to each other, so that equal values do not hide each other.
        across = silos.numbers + 0.6 * ((place + 0.5) / len(groups) - 0.5)
        drawn: Any = {**stroke(look), "linestyle": "none", "label": figure_text(label)}
        for axes, (metric, part) in zip(grid, measures, strict=True):
            if metric.of(part) not in silos.values:
                continue
            each = silos.values[metric.of(part)] * metric.scale
            spread = each.std(axis=0, ddof=1) if len(each) > 1 else None
            axes.errorbar(across, each.mean(axis=0), spread, elinewidth=0.8, capsize=2, **drawn)
    for axes, (metric, part) in zip(grid, measures, strict=True):
        axes.set(xlabel="Silo", ylabel=lines(of_part(metric, part).title, axes.bbox.height, drawing))
        if all(name.isdecimal() for name in names.values()):
            whole_numbers(axes)
        else:
            axes.set_xticks(list(names), [figure_text(name, 20) for name in names.values()], rotation=30, ha="right")
        if metric.percent:
            within_percent(axes)
    drawing.suptitle(f"{problem}: silo by silo, after the last evaluation" + over_seeds(groups), wrap=True)
    legend_below(drawing, grid)
    return drawing


def _diagnostics(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """One panel per number of --diagnose; the gradient at z is in that of the gradient at x."""
    known = [measure for measure in DIAGNOSED if any(one.has(measure) for one in groups)]
    wanted = [measure for measure in known if measure != "gradient_norm_z"]
    drawing, grid = panels(style, len(wanted), 3, 4.2, 3.1, 0.6)
    for axes, measure in zip(grid, wanted, strict=True):
        for each in drawn_series(groups):
            curve(axes, each, measure)
            if measure == "gradient_norm":
                at_z = points(each.group, "gradient_norm_z", POINTS)
                axes.plot(at_z.rounds, at_z.y, color=each.look.colour, linestyle=":", linewidth=0.9)
        axis(axes, measure)
        if measure == "gradient_norm":
            axes.set_title("thin and dotted: at z")
    drawing.suptitle(f"{problem}: diagnostics" + over_seeds(groups), wrap=True)
    legend_below(drawing, grid)
    return drawing


def _facets(problem: str, groups: Sequence[Group], measure: str, style: Style) -> Drawing:
    """One panel per method, the other methods' curves behind it in grey."""
    named = dict(zip(map(id, groups), fitting(labels(groups)), strict=True))
    facets: list[list[Group]] = []
    for method in dict.fromkeys(one.method for one in groups):
        same_method = [one for one in groups if one.method == method]
        each = -(-len(same_method) // -(-len(same_method) // 8))
        facets += [same_method[i : i + each] for i in range(0, len(same_method), each)]
    drawing, grid = panels(style, len(facets), 3, 4.2, 3.4, sharex=True, sharey=True)
    for axes, shown in zip(grid, facets, strict=True):
        others = [one for one in groups if all(one is not s for s in shown)]
        behind = [np.column_stack(points(one, measure, 100)[:2]) for one in others]
        axes.add_collection(LineCollection(behind, colors="#d9dce1", linewidths=0.6, zorder=1), autolim=False)
        for one, look in zip(shown, looks(shown), strict=True):
            name = lines(named[id(one)], 0.8 * axes.bbox.width, drawing)
            curve(axes, Series(one, named[id(one)], look), measure, name=name)
        corner: Any = "lower right" if quantities(shown[0].columns)[measure].percent else "upper right"
        axes.legend(fontsize=7 if style.widths is None else 5.5, loc=corner, handlelength=2.6, labelspacing=0.3)
    columns = groups[0].columns
    for axes in grid:  # after all curves, as the panels share their axes
        axis(axes, measure, columns=columns)
    drawing.suptitle(f"{problem}: {figure_text(quantities(columns)[measure].title)}", wrap=True)
    return drawing


def _heat_map(one: HeatMap, style: Style) -> Drawing:
    """The values over two settings, each in its cell."""
    (across, down), means = one.ticks, np.array(one.means, dtype=float)
    drawing, (axes,) = panels(style, 1, 1, 2.6 + 0.72 * len(across), 0.9 + 0.42 * len(down), 0.4)
    colours = LinearSegmentedColormap.from_list("sweep", COLOURS)
    low, high = one.extent
    drawn = axes.pcolormesh(np.ma.masked_invalid(means), cmap=colours, vmin=low, vmax=high, edgecolors="white", lw=1.5)
    axes.set_facecolor("#e4e6ea")
    small: Any = {"ha": "center", "va": "center", "fontsize": 8 if len(across) <= 10 else 5.5}
    for (row, column), mean in np.ndenumerate(means):
        known = np.isfinite(mean)
        ink, shown = (one.ink(mean), one.short(mean)) if known else ("#5f6670", "–")
        weight = "bold" if mean == one.best else "normal"
        axes.text(column + 0.5, row + 0.5, shown, color=ink, weight=weight, **small)
    axes.set_xticks(np.arange(len(across)) + 0.5, [figure_text(each) for each in across])
    axes.set_yticks(np.arange(len(down)) + 0.5, [figure_text(each) for each in down])
    axes.set(xlabel=one.x_name, ylabel=one.y_name)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.invert_yaxis()
    drawing.colorbar(drawn, label=figure_text(one.value_name)).outline.set_visible(False)
    drawing.suptitle(figure_text(one.heading, 100), fontsize="medium", wrap=True)
    return drawing


def _phases(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """Seconds per round by phase, one bar per group."""
    names = [figure_text(name) for name in fitting(labels(groups), 40)]
    drawing, (axes,) = panels(style, 1, 1, 8.4, 0.28 * len(groups) + 0.5, 1.0)
    left = np.zeros(len(groups))
    for phase, colour, seconds in phase_bars(groups):
        values = np.array([each or 0.0 for each in seconds])
        axes.barh(names, values, left=left, color=colour, label=phase, height=0.7)
        left += values
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("Seconds per round\n(slowest rank of each phase; evaluation may overlap the next round)")
    drawing.suptitle(f"{problem}: where the time goes", wrap=True)
    axes.margins(y=0.01)
    legend_below(drawing, [axes])
    return drawing


def _ranks(problem: str, groups: Sequence[Group], style: Style) -> Drawing:
    """Seconds of training and waiting by rank, in the last run of each group."""
    drawing, grid = panels(style, len(groups), 4, 2.9, 2.2, 0.5, sharey=True)
    for axes, one, name in zip(grid, groups, fitting(labels(groups), 40), strict=True):
        last = (
            one.runs[-1].by_rank if "wait" in one.runs[-1].by_rank else next(r.by_rank for r in one.runs if r.by_rank)
        )
        ranks = np.arange(len(last["wait"]))
        train = last.get("train", np.zeros(len(ranks)))
        axes.bar(ranks, train, color=PHASE_COLOURS[1], label="training")
        axes.bar(ranks, last["wait"], bottom=train, color="#c9ced6", label="waiting")
        axes.set_title(lines(name, axes.bbox.width, drawing), fontsize=8)
        axes.set_xlabel("Rank")
        axes.grid(axis="x", visible=False)
        whole_numbers(axes)
    grid[0].set_ylabel("Seconds per round")
    drawing.suptitle(f"{problem}: training and waiting by rank", wrap=True)
    legend_below(drawing, grid)
    return drawing
