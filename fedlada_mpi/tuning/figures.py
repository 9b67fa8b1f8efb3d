"""The figures of a search: the landscape of the scores over the settings, and the trials over the rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D

from ..analysis.drawing import Planned, Style, from_zero, legend_below, panels, whole_numbers, within_percent
from ..analysis.load import RecordedRun
from ..analysis.series import of_part
from ..analysis.setups import in_words, setting_name
from ..analysis.sweeps import COLOURS, INKS
from ..rundir.columns import Metric
from ..support.inputs import figure_text
from .outcomes import Outcome
from .space import Choices, Domain
from .strategies import Rung

BEST, GREY = "#d9400f", "#8a8f98"
SIZES = (34, 70, 120, 180, 240)  # of markers, by rung
# Lines and points must stand out from the page, on which the lightest colour does not.
SHADES = LinearSegmentedColormap.from_list("scores", COLOURS[1:])
FEW = 8  # points of a curve that are marked
DARK_FROM = 0.5  # of the range of scores, where text is white
NUMBERED = 40  # trials whose scores are written next to their points
LABELLED = 6  # values of an axis, at most, that are named


class Trial(NamedTuple):
    """A trial as figures show it."""

    number: int
    point: dict[str, Any]
    course: list[Outcome]  # on the rungs that it was on, as far as they are known
    run: RecordedRun | None

    @property
    def scores(self) -> list[float]:
        return [outcome.score for outcome in self.course if outcome.known]

    @property
    def last(self) -> float:
        """Its score on the last rung that it was on; NaN where it has none there."""
        return self.course[-1].score if self.course else math.nan


class Landscape(NamedTuple):
    """What the trials of one method have shown."""

    slug: str  # of the method, in names of files
    title: str
    space: dict[str, Domain]
    trials: list[Trial]
    rungs: list[Rung]
    winner: int | None
    objective: Metric

    @property
    def name(self) -> str:
        return f"landscape_{self.slug}"

    @property
    def value_name(self) -> str:
        return of_part(self.objective, "val").title

    @property
    def worst_first(self) -> list[Trial]:
        """Trials with a score, the worst one first, so that better ones are drawn above it."""
        sign = 1 if self.objective.larger_is_better else -1
        known = [trial for trial in self.trials if not math.isnan(trial.last)]
        return sorted(known, key=lambda trial: (len(trial.course), sign * trial.last))

    @property
    def failed(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.course and math.isnan(trial.last)]

    def shades(self) -> tuple[Normalize, LinearSegmentedColormap]:
        """Dark is good, whichever way the objective runs."""
        values = [self.objective.scale * trial.last for trial in self.worst_first]
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if high == low:
            low, high = low - 0.5, high + 0.5
        return Normalize(low, high), SHADES if self.objective.larger_is_better else SHADES.reversed()


def plan(landscapes: Sequence[Landscape]) -> list[Planned]:
    """The figures for which there are scores."""
    known = [one for one in landscapes if one.worst_first]
    drawn: list[Planned] = [(one.name, partial(_landscape, one)) for one in known]
    curves = [one for one in known if any(trial.run for trial in one.trials)]
    return [*drawn, *([("trials", partial(_curves, curves))] if curves else [])]


def _landscape(one: Landscape, style: Style) -> Drawing:
    if len(one.space) == 1:
        drawing = _line(one, style)
    elif len(one.space) == 2:
        crossed = all(isinstance(domain, Choices) for domain in one.space.values()) and len(one.rungs) == 1
        drawing = (_heat_map if crossed else _scatter)(one, style)
    else:
        drawing = _parallel(one, style)
    drawing.suptitle(figure_text(f"{one.title}: {_over(one)}", 100), fontsize="medium", wrap=True)
    return drawing


def _over(one: Landscape) -> str:
    names = " and ".join([", ".join(map(setting_name, list(one.space)[:-1])), setting_name([*one.space][-1])])
    return f"{one.value_name} over {names.removeprefix(' and ')}"


def _ordered(domain: Choices) -> list[Any]:
    return sorted(domain.values) if domain.numeric else list(domain.values)


def _at(domain: Domain, value: Any) -> float:
    """The place of a value on an axis: numbers of a range where they are, choices evenly spaced."""
    return float(_ordered(domain).index(value)) if isinstance(domain, Choices) else float(value)


def _set_axis(axis: Any, set_scale: Any, set_limits: Any, name: str, domain: Domain) -> None:
    if isinstance(domain, Choices):
        values = _ordered(domain)
        axis.set_ticks(range(len(values)), [figure_text(in_words(name, value), 20) for value in values])
        set_limits(-0.5, len(values) - 0.5)
        return
    if domain.log:
        set_scale("log")
        ticks = _round_values(domain.low, domain.high)
        axis.set_ticks(ticks, [f"{value:g}" for value in ticks])
        axis.set_ticks([], minor=True)
    # A little more than the range, so that its ends are seen, too.
    by = (domain.high / domain.low) ** 0.05 if domain.log else 0.05 * (domain.high - domain.low)
    set_limits(*((domain.low / by, domain.high * by) if domain.log else (domain.low - by, domain.high + by)))


def _round_values(low: float, high: float) -> list[float]:
    """What is written beside a logarithmic axis: 1, 2 and 5 times powers of ten; beside a long one the powers alone.

    >>> _round_values(0.02, 0.5)
    [0.02, 0.05, 0.1, 0.2, 0.5]
    >>> _round_values(1e-6, 0.1)
    [1e-06, 1e-05, 0.0001, 0.001, 0.01, 0.1]
    """
    digits = (1, 2, 5) if high <= 1000 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [float(f"{digit}e{power}") for power in powers for digit in digits]
    return [value for value in values if low <= value * (1 + 1e-9) and value <= high * (1 + 1e-9)]


def _axes_of(axes: Axes, one: Landscape) -> None:
    """Titles, scales and ticks of both axes of a map."""
    x, y = one.space
    axes.set(xlabel=setting_name(x), ylabel=setting_name(y))
    _set_axis(axes.xaxis, axes.set_xscale, axes.set_xlim, x, one.space[x])
    _set_axis(axes.yaxis, axes.set_yscale, axes.set_ylim, y, one.space[y])


def _line(one: Landscape, style: Style) -> Drawing:
    """Scores against the only setting, those of each rung in a colour of its own."""
    ((name, domain),) = one.space.items()
    drawing, (axes,) = panels(style, 1, 1, 7.2, 3.8, 0.4)
    colours = [SHADES(0.25 + 0.75 * i / max(1, len(one.rungs) - 1)) for i in range(len(one.rungs))]
    for at, rung in enumerate(one.rungs):
        there = [trial for trial in one.trials if len(trial.course) > at and trial.course[at].known]
        pairs = sorted((_at(domain, t.point[name]), one.objective.scale * t.course[at].score) for t in there)
        x, y = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        axes.plot(x, y, "o-", color=colours[at], ms=6, lw=1.2, label=f"after round {rung.rounds}", zorder=3 + at)
    for trial in one.trials:
        if trial.number == one.winner:
            place = (_at(domain, trial.point[name]), one.objective.scale * trial.last)
            axes.plot(*place, "o", ms=13, mfc="none", mec=BEST, mew=2, ls="none", label="winner", zorder=20)
    bottom = axes.get_ylim()[0 if one.objective.larger_is_better else 1]
    for i, trial in enumerate(one.failed):
        label = "diverged or failed" if not i else None
        axes.plot(_at(domain, trial.point[name]), bottom, "x", color=GREY, ms=7, mew=1.8, label=label, clip_on=False)
    axes.set(xlabel=setting_name(name), ylabel=figure_text(one.value_name))
    _set_axis(axes.xaxis, axes.set_xscale, axes.set_xlim, name, domain)
    if one.objective.percent:
        within_percent(axes)
    legend_below(drawing, [axes])
    return drawing


def _short(one: Landscape, score: float) -> str:
    return f"{one.objective.scale * score:.1f}" if one.objective.percent else f"{score:.4g}"


def _heat_map(one: Landscape, style: Style) -> Drawing:
    """The scores of a grid, each in its cell; the winner is framed."""
    x, y = one.space
    across, down = (_ordered(domain) for domain in one.space.values() if isinstance(domain, Choices))
    drawing, (axes,) = panels(style, 1, 1, 2.8 + 0.85 * len(across), 1.1 + 0.5 * len(down), 0.4)
    norm, colours = one.shades()
    values = np.full((len(down), len(across)), np.nan)
    for trial in one.trials:
        values[down.index(trial.point[y]), across.index(trial.point[x])] = one.objective.scale * trial.last
    masked = np.ma.masked_invalid(values)
    drawn = axes.pcolormesh(masked, cmap=colours, norm=norm, edgecolors="white", lw=1.5)
    axes.set_facecolor("#e4e6ea")
    for trial in one.trials:
        row, column = down.index(trial.point[y]), across.index(trial.point[x])
        if math.isnan(trial.last):
            shown, ink = trial.course[-1].state if trial.course else "–", "#5f6670"
        else:
            share = float(norm(one.objective.scale * trial.last))
            dark = (share if one.objective.larger_is_better else 1 - share) >= DARK_FROM
            shown, ink = _short(one, trial.last), INKS[int(dark)]
        best = trial.number == one.winner
        weight: Any = "bold" if best else "normal"
        axes.text(column + 0.5, row + 0.5, shown, color=ink, weight=weight, ha="center", va="center", fontsize=8.5)
        if best:
            frame = [(column, column + 1, column + 1, column, column), (row, row, row + 1, row + 1, row)]
            axes.plot(*frame, color=BEST, lw=2.4, zorder=5, clip_on=False)
    axes.set_xticks(np.arange(len(across)) + 0.5, [figure_text(in_words(x, v), 20) for v in across])
    axes.set_yticks(np.arange(len(down)) + 0.5, [figure_text(in_words(y, v), 20) for v in down])
    axes.set(xlabel=setting_name(x), ylabel=setting_name(y))
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.invert_yaxis()
    drawing.colorbar(drawn, label=figure_text(one.value_name)).outline.set_visible(False)
    return drawing


def _scatter(one: Landscape, style: Style) -> Drawing:
    """A point for each trial: its colour is its last score, its size the rung that it got to."""
    x, y = one.space
    drawing, (axes,) = panels(style, 1, 1, 7.6, 4.4, 0.4)
    norm, colours = one.shades()
    drawn: Any = None
    across = sorted(one.worst_first, key=lambda trial: _at(one.space[x], trial.point[x]))
    for trial in one.worst_first:
        place = (_at(one.space[x], trial.point[x]), _at(one.space[y], trial.point[y]))
        size, best = SIZES[min(len(trial.course), len(SIZES)) - 1], trial.number == one.winner
        edge: Any = dict(edgecolors=BEST if best else "#5f6670", linewidths=2.4 if best else 0.6)
        drawn = axes.scatter(
            *place, s=size, c=[one.objective.scale * trial.last], cmap=colours, norm=norm, zorder=3, **edge
        )
        if len(one.trials) > NUMBERED and not best:
            continue
        # Above and below in turns, so that neighbours do not write over each other.
        offset = (math.sqrt(size) / 2 + 5) * (1 if across.index(trial) % 2 else -1)
        words: Any = dict(textcoords="offset points", ha="center", va="center", fontsize=7)
        axes.annotate(_short(one, trial.last), place, (0, offset), **words)
    for trial in one.failed:
        place = (_at(one.space[x], trial.point[x]), _at(one.space[y], trial.point[y]))
        axes.plot(*place, "x", color=GREY, ms=7, mew=1.8, zorder=2)
    _axes_of(axes, one)
    drawing.colorbar(drawn, label=figure_text(one.value_name)).outline.set_visible(False)
    _legend(drawing, one)
    return drawing


def _legend(drawing: Drawing, one: Landscape) -> None:
    def mark(size: float, **more: Any) -> Line2D:
        style: dict[str, Any] = {"marker": "o", "ls": "none", "mfc": SHADES(0.5), "mec": "#5f6670", "mew": 0.6}
        return Line2D([], [], ms=math.sqrt(size), **{**style, **more})

    handles = {_reached(one, i + 1): mark(SIZES[min(i, len(SIZES) - 1)]) for i in range(len(one.rungs))}
    handles["winner"] = mark(SIZES[0], mec=BEST, mew=2.4)
    if one.failed:
        handles["diverged or failed"] = mark(SIZES[0], marker="x", mec=GREY, mew=1.8)
    drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))


def _share(domain: Domain, value: Any) -> float:
    """The place of a value on an axis from 0 to 1."""
    if isinstance(domain, Choices):
        values = _ordered(domain)
        return values.index(value) / (len(values) - 1) if len(values) > 1 else 0.5
    low, high, value = (math.log(v) if domain.log else float(v) for v in (domain.low, domain.high, value))
    return (value - low) / (high - low)


def _ticks(name: str, domain: Domain) -> list[tuple[float, str]]:
    """Named places of an axis."""
    if isinstance(domain, Choices):
        values = _ordered(domain)
        step = -(-len(values) // LABELLED)
        return [(_share(domain, value), in_words(name, value)) for value in values[::step]]
    if domain.log:
        first, last = math.ceil(math.log10(domain.low) - 1e-9), math.floor(math.log10(domain.high) + 1e-9)
        inner: list[float] = [10.0**power for power in range(first, last + 1)]
    else:
        inner = [domain.low + (domain.high - domain.low) * i / 4 for i in (1, 2, 3)]
    found = {_share(domain, value): f"{value:.3g}" for value in (domain.low, *inner, domain.high)}
    places = sorted(found)
    # Not where the next one would be written over it.
    kept = [p for p in places if p in (0.0, 1.0) or (p > 0.06 and p < 0.94)]
    return [(place, found[place]) for place in kept]


def _parallel(one: Landscape, style: Style) -> Drawing:
    """Parallel coordinates: a line for each trial, through its settings to its score on each rung."""
    names, scale = [*one.space], one.objective.scale
    count = len(names) + len(one.rungs)
    drawing, (axes,) = panels(style, 1, 1, min(11.0, max(7.2, 1.7 * count)), 4.4, 0.4)
    norm, colours = one.shades()
    known = [scale * score for trial in one.trials for score in trial.scores]
    low, high = min(known), max(known)
    if high == low:
        low, high = low - 0.5, high + 0.5
    for trial in [*one.failed, *one.worst_first]:
        places = [_share(one.space[name], trial.point[name]) for name in names]
        places += [(scale * score - low) / (high - low) for score in trial.scores]
        best, failed = trial.number == one.winner, math.isnan(trial.last)
        colour: Any = BEST if best else GREY if failed else colours(norm(scale * trial.last))
        line: Any = dict(lw=2.6 if best else 1.2, ls=":" if failed else "-", zorder=9 if best else 3)
        axes.plot(range(len(places)), places, color=colour, marker="o", ms=4.5 if best else 3, **line)
        if failed:
            axes.plot(len(places) - 1, places[-1], "x", color=GREY, ms=7, mew=1.8, zorder=4)
    for i, name in enumerate(names):
        for place, text in _ticks(name, one.space[name]):
            _tick(axes, i, place, figure_text(text, 14))
    values = [low + (high - low) * i / 4 for i in range(5)]
    for i in range(len(names), count):
        for value in values:
            _tick(axes, i, (value - low) / (high - low), f"{value:.1f}" if one.objective.percent else f"{value:.4g}")
    titles = [*map(setting_name, names), *(f"score after\nround {rung.rounds}" for rung in one.rungs)]
    axes.set_xticks(range(count), [figure_text(title, 30) if "\n" not in title else title for title in titles])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.set_ylim(-0.06, 1.06)
    axes.set_xlim(-0.45, count - 0.75)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for i in range(count):
        axes.plot([i, i], [0, 1], color="#5f6670" if i < len(names) else "#1d2127", lw=1.1, zorder=2)
    handles = {
        "winner": Line2D([], [], color=BEST, lw=2.6),
        "better trials are darker": Line2D([], [], color=SHADES(0.9)),
    }
    if one.failed:
        handles["diverged or failed"] = Line2D([], [], color=GREY, ls=":", marker="x")
    drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return drawing


def _tick(axes: Axes, x: float, y: float, text: str) -> None:
    box: Any = dict(boxstyle="square,pad=0.1", facecolor="white", edgecolor="none", alpha=0.75)
    axes.text(x - 0.04, y, text, ha="right", va="center", fontsize=7, color="#1d2127", bbox=box, zorder=12)


def _curves(landscapes: Sequence[Landscape], style: Style) -> Drawing:
    """The validation objective of every trial over the rounds, darker the further it got; a panel for each method."""
    drawing, grid = panels(style, len(landscapes), 2, 5.6, 3.6, 0.6, sharey=True)
    for axes, one in zip(grid, landscapes, strict=True):
        column, scale = one.objective.of("val"), one.objective.scale
        for trial in sorted(one.trials, key=lambda trial: (trial.number == one.winner, len(trial.course))):
            if trial.run is None or not trial.course:
                continue
            values = trial.run.series[column]
            known = ~np.isnan(values)
            best, failed = trial.number == one.winner, math.isnan(trial.last)
            share = 0.15 + 0.85 * len(trial.course) / (len(one.rungs) + 1)
            colour: Any = BEST if best else GREY if failed else SHADES(share)
            label = "winner" if best else "diverged or failed" if failed else _reached(one, len(trial.course))
            drawn: Any = dict(lw=2.4 if best else 1.0, ls=":" if failed else "-", zorder=9 if best else 3, ms=3)
            drawn["marker"] = "o" if known.sum() <= FEW else None
            axes.plot(trial.run.rounds[known], scale * values[known], color=colour, label=label, **drawn)
        for rung in one.rungs[:-1]:
            axes.axvline(rung.rounds, color="#5f6670", lw=0.8, ls=(0, (2, 3)), zorder=1)
        axes.set(xlabel="Round", ylabel=figure_text(one.value_name), title=figure_text(one.title))
        from_zero(axes)
        whole_numbers(axes)
    if landscapes[0].objective.percent:  # after all curves, as the panels share their axis
        within_percent(grid[0])
    legend_below(drawing, grid)
    return drawing


def _reached(one: Landscape, rungs: int) -> str:
    if len(one.rungs) == 1:
        return "trials"
    rounds = one.rungs[max(0, rungs - 1)].rounds
    return f"up to round {rounds}" if rungs == len(one.rungs) else f"left out after round {rounds}"
