"""Drawing with matplotlib: styles for a screen and for a paper, panels, curves, axes and legends, and their files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import NullFormatter

from ..rundir.columns import CLASSIFICATION, Columns
from ..support.inputs import figure_text
from ..support.processes import process_map, usable_cores
from . import latex
from .groups import Group
from .series import LOGARITHMIC, LOOKS, MARKERS, Look, Series, points, points_by_run, quantities, series, spent

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
WORTH_A_PROCESS = 8  # figures; fewer are drawn before another process has imported matplotlib
LONGEST = 60  # characters of a name
LEGEND_ROWS = 3  # that a figure has room for
SINGLE_LINES = 5  # seeds; of more, a figure shows only the mean and the standard deviation

# A figure's name and the function that draws it.
Planned = tuple[str, Callable[[Style], Drawing]]


def write(planned: Sequence[Planned], folder: Path, style: str = "screen") -> list[str]:
    """Draw the figures into a folder; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
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


def panels(
    style: Style, count: int, columns: int, width: float, height: float, more: float = 0.0, **options: Any
) -> tuple[Drawing, list[Axes]]:
    """So many panels in rows of at most ``columns``, each so wide and high on a screen, in inches, with ``more`` for
    what is above and below all of them; on paper they share the width of a column, or of the text if there are several
    next to each other."""
    columns = max(1, min(columns, count))
    rows = max(1, -(-count // columns))
    if style.widths:
        column, text = style.widths
        whole = column if columns == 1 and width < column * 2 else text
        width, height = whole / columns, height * min(1.0, whole / columns / width)
    size = (width * columns, height * rows + more)
    drawing, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    for axes in list(grid.flat)[count:]:
        axes.set_axis_off()
    return drawing, list(grid.flat)[:count]


def fitting(names: Sequence[str], length: int = LONGEST) -> list[str]:
    """The names as figures have room for them, each another one: long ones without their middle, as their ends tell
    most of them apart, and numbered where these are alike."""
    half = (length - len("… (10)")) // 2
    short = [name if len(name) <= length else f"{name[:half]}…{name[-half:]}" for name in names]
    alike, count = Counter(short), Counter[str]()
    for i, name in enumerate(short):
        if alike[name] > 1:
            count[name] += 1
            short[i] = f"{name} ({count[name]})"
    return short


def drawn_series(groups: Sequence[Group]) -> list[Series]:
    """The groups of one figure, with names that fit."""
    known = series(groups)
    names = fitting([each.label for each in known])
    return [each._replace(label=name) for each, name in zip(known, names, strict=True)]


def lines(text: str, pixels: float, drawing: Any) -> str:
    """Text for a figure in lines of at most so many pixels, in the usual size or a smaller one."""
    wide = max(10, int(pixels / drawing.dpi * 72 / (0.56 * plt.rcParams["font.size"])))
    return "\n".join(
        figure_text(line, wide) for line in wrap(text, wide, break_on_hyphens=False, max_lines=3, placeholder="…")
    )


def stroke(look: Look) -> dict[str, Any]:
    """How matplotlib draws a line in that look."""
    return {"color": look.colour, "linestyle": (0, look.dash) if look.dash else "solid", "marker": look.marker}


def spaced_markers(look: Look, count: int) -> tuple[int, int]:
    """The first marker on a curve of so many points, and their distance: those of near curves do not coincide."""
    every = max(1, count // MARKS)
    first = LOOKS.index(look) % len(MARKERS) * every // len(MARKERS)
    return min(first, count - 1), every


def curve(axes: Axes, series: Series, measure: str, x: str = "", limit: int | None = None, name: str = "") -> None:
    """Draw a group's curve over the rounds, or over what was ``spent``, with its band and its single runs; ``name`` is
    text for a figure in place of the label."""
    one, look = series.group, series.look
    shown = points(one, measure, POINTS, limit)
    if not len(shown.rounds):
        return
    across = spent(one, x, shown.rounds) if x else shown.rounds
    line = {**stroke(look), "markevery": spaced_markers(look, len(across))}
    if len(across) == 1:
        line["linestyle"] = "solid"
    axes.plot(across, shown.y, label=name or figure_text(series.label), **line)
    if shown.std is not None:
        axes.fill_between(across, shown.y - shown.std, shown.y + shown.std, color=look.colour, alpha=0.16, linewidth=0)
        if not x and len(one.runs) <= SINGLE_LINES:
            for run in points_by_run(one, measure, POINTS, limit):
                axes.plot(run.rounds, run.y, color=look.colour, linewidth=0.5, alpha=0.5)


def axis(axes: Axes, measure: str, x: str = "Round", columns: Columns = CLASSIFICATION) -> None:
    """Titles and scales of a panel of curves, once these are drawn."""
    quantity = quantities(columns)[measure]
    axes.set_xlabel(x)
    axes.set_ylabel(lines(quantity.title, axes.bbox.height, axes.figure))
    if measure in LOGARITHMIC and any((np.asarray(line.get_ydata()) > 0).any() for line in axes.lines):
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high >= 10 * low:  # else there may be no number at all
            axes.yaxis.set_minor_formatter(NullFormatter())
    if quantity.percent:
        within_percent(axes)
    from_zero(axes)


def within_percent(axes: Axes) -> None:
    """The vertical axis of shares, once all is drawn: margins would take it to 104 %."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 100))


def from_zero(axes: Axes) -> None:
    """The horizontal axis of rounds."""
    axes.margins(x=0.01)
    axes.set_xlim(left=0)


def whole_numbers(axes: Axes) -> None:
    """The horizontal axis of ranks or silos."""
    axes.locator_params(axis="x", integer=True)


def legend_below(drawing: Drawing, panels: Iterable[Axes]) -> None:
    handles = {text: handle for axes in panels for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        size = 1.0 if plt.rcParams["font.size"] > 8 else 0.8
        inches = size * (0.8 + 0.075 * max(map(len, handles)))
        columns = max(1, min(len(handles), int(drawing.get_figwidth() / inches)))
        more = max(0, -(-len(handles) // columns) - LEGEND_ROWS)
        drawing.set_figheight(drawing.get_figheight() + 0.19 * size * more)
        drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, handlelength=3.2)


def over_seeds(groups: Sequence[Group]) -> str:
    """The end of a title: over how many seeds its curves are."""
    counts = sorted({len(one.runs) for one in groups})
    if counts == [1]:
        return ""
    many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    common = ", over the rounds that all have" if any(one.uneven for one in groups) else ""
    return f", mean ± standard deviation of {many} seeds{common}"
