"""A picture of the clients' label distributions: bars for a few classes, a heat map for many.

Of data without classes it shows the clients' sizes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..support.inputs import figure_text
from ..support.warning_filters import warning_filter
from .manifest import TEST_FILE, VALIDATION_FILE, Manifest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "label_distribution.png"
MOST_BARS = 20  # classes
MOST_SINGLE_BARS, MOST_COLUMNS, MOST_NAMED = 150, 1000, 12  # clients
PARTS = ("training", "own tests")  # in place of classes, where there are none
INK, FAINT = "#222222", "#8a8a8a"
# Tableau's ten colours and their light counterparts: distinguishable next to any other.
# fmt: off
COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2", "#ff9da7", "#9c755f", "#bab0ac",
    "#a0cbe8", "#ffbe7d", "#8cd17d", "#ff9d9a", "#d4a6c8", "#f1ce63", "#86bcb6", "#fabfd2", "#d7b5a6", "#79706e",
)
# fmt: on


def draw(manifest: Manifest, path: Path) -> None:
    """Write the picture as PNG; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not manifest.counts.size:
        manifest = _as_one_class(manifest)
    few = manifest.classes <= MOST_BARS
    figure = Figure(figsize=(12, 5.2 if few else 7.6), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    main, totals = figure.subplots(1, 2, width_ratios=(6, 1.15), sharey=not few)
    if few:
        _bars(main, manifest)
        _total_bars(totals, manifest)
    else:
        _map(figure, main, manifest)
        _total_profile(totals, manifest)
    _mark_silos(main, manifest)
    title = figure_text(_title(manifest), 300)
    figure.suptitle(title, fontsize=13 if len(title) < 100 else 10.5, fontweight="bold", color=INK, x=0.01, ha="left")
    # Names may be in any script; where the font has no such letter, it draws a box.
    with warning_filter("ignore", message="Glyph .* missing from"):
        figure.savefig(path, format="png")


def _as_one_class(manifest: Manifest) -> Manifest:
    """Rows for training and for the clients' own tests, where rows have no classes."""
    parts = [manifest.sizes, manifest.test_sizes][: 1 + manifest.own_tests]
    return replace(manifest, classes=len(parts), class_names=PARTS[: len(parts)], counts=np.stack(parts, axis=1))


def _bars(axes: Axes, manifest: Manifest) -> None:
    single = manifest.clients <= MOST_SINGLE_BARS
    edges = np.arange(manifest.clients + 1)
    if manifest.clients > MOST_COLUMNS:  # each the mean of neighbours: a picture has no more columns
        edges = np.linspace(0, manifest.clients, MOST_COLUMNS + 1).astype(int)
    counts = np.add.reduceat(manifest.counts, edges[:-1]) / np.diff(edges)[:, None]
    bottom = np.zeros(len(counts))
    for label in range(manifest.classes):
        top = bottom + counts[:, label]
        if single:
            axes.bar(edges[:-1], top - bottom, 0.86, bottom=bottom, color=COLOURS[label], linewidth=0)
        else:  # touching bars as one shape per class: thousands of single ones take minutes
            low, high = (np.append(values, values[-1]) for values in (bottom, top))
            axes.fill_between(edges - 0.5, low, high, step="post", color=COLOURS[label], linewidth=0)
        bottom = top
    axes.set_ylim(0, bottom.max() * 1.001)
    _plain(axes)
    axes.set_ylabel(_what(manifest), color=INK)


def _total_bars(axes: Axes, manifest: Manifest) -> None:
    """Images per class over all clients; doubles as the legend."""
    totals = manifest.counts.sum(axis=0)
    labels = np.arange(manifest.classes)
    axes.barh(labels, totals, 0.78, color=COLOURS[: manifest.classes], linewidth=0)
    for label, total in enumerate(totals):
        axes.annotate(
            f"{total:,}", (total, label), (3, 0), textcoords="offset points", va="center", fontsize=7.5, color=FAINT
        )
    axes.set_yticks(labels, [_short(name) for name in manifest.class_names], fontsize=8.5)
    # The lowest class of the stacked bars is the lowest here, too.
    axes.set_ylim(-0.6, manifest.classes - 0.4)
    axes.set_xlim(0, totals.max() * 1.32)
    axes.set_xticks([])
    axes.set_title(
        f"{_what(manifest)} per class" if manifest.class_names != PARTS[: manifest.classes] else "rows",
        fontsize=9,
        color=FAINT,
    )
    _plain(axes)
    axes.spines["bottom"].set_visible(False)


def _map(figure: Figure, axes: Axes, manifest: Manifest) -> None:
    from matplotlib.colors import PowerNorm

    counts = np.ma.masked_equal(manifest.counts.T, 0)
    # A square-root scale keeps a class of two images visible next to one of a hundred.
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, counts.max()))
    axes.set_facecolor("#f6f6f6")
    image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="magma_r", norm=norm)
    step = max(1, -(-manifest.classes // 50))
    ticks = np.arange(0, manifest.classes, step)
    size = 6.2 if len(ticks) > 30 else 8
    axes.set_yticks(ticks, [f"{_short(manifest.class_names[tick])} {tick}" for tick in ticks], fontsize=size)
    _plain(axes)
    bar = figure.colorbar(
        image, ax=axes, orientation="horizontal", location="bottom", fraction=0.035, aspect=60, pad=0.02
    )
    bar.set_label(f"{_what(manifest)} of a class on a client", fontsize=9, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2)


def _total_profile(axes: Axes, manifest: Manifest) -> None:
    totals = manifest.counts.sum(axis=0)
    axes.barh(np.arange(manifest.classes), totals, 1.0, color="#b63679", linewidth=0)
    axes.set_xlim(0, totals.max() * 1.05)
    axes.set_title(f"{_what(manifest)} per class", fontsize=9, color=FAINT)
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.tick_params(axis="x", labelsize=8)
    _plain(axes)


def _mark_silos(axes: Axes, manifest: Manifest) -> None:
    """Client numbers below, a line and a number for each silo above."""
    starts = np.array([ids[0] for ids in manifest.client_ids])
    ends = np.array([ids[-1] for ids in manifest.client_ids])
    axes.set_xlim(-0.5, manifest.clients - 0.5)
    axes.set_xlabel("client", color=INK)
    if manifest.clients <= MOST_NAMED:
        names = manifest.client_names or tuple(map(str, range(manifest.clients)))
        axes.set_xticks(range(manifest.clients), [_short(name, 90 // manifest.clients) for name in names])
    if manifest.silos <= 100:
        for start, end in zip(starts, ends, strict=True):
            across = axes.get_xaxis_transform()
            axes.plot(
                [start - 0.4, end + 0.4], [1.012, 1.012], transform=across, clip_on=False, color=FAINT, linewidth=1
            )
        for start in starts[1:]:
            axes.axvline(start - 0.5, color="white", linewidth=2.0)
    step = max(1, -(-manifest.silos // 25))
    for silo in range(0, manifest.silos, step):
        middle = (starts[silo] + ends[silo]) / 2
        text = f"silo {silo + 1}" if manifest.silos <= 12 else f"{silo + 1}"
        axes.annotate(
            text,
            (middle, 1),
            (0, 8),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=FAINT,
        )
    if manifest.silos > 12:
        axes.annotate(
            "silo",
            (0, 1),
            (-4, 8),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=FAINT,
        )


def _plain(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=2)


def _title(manifest: Manifest) -> str:
    rule = manifest.partition
    how = {
        "dirichlet": f"Dirichlet({rule.get('dirichlet')}), {rule.get('exhausted')}",
        "pathological": f"{rule.get('classes_per_client')} classes per client, {rule.get('exhausted')}",
        "iid": "iid",
        "natural": "natural owners",
    }[rule["kind"]]
    if rule.get("size_sigma"):
        how += f", sizes lognormal({rule['size_sigma']})"
    low, high = manifest.sizes.min(), manifest.sizes.max()
    what = _what(manifest)
    each = f"{low:,} {what} each" if low == high else f"{low:,} to {high:,} {what} each"
    tests = manifest.rows(TEST_FILE) if TEST_FILE in manifest.files else int(manifest.test_sizes.sum())
    test = f"{tests:,} test {what}{' of their own' * manifest.own_tests}"
    if manifest.validation:
        test = f"{manifest.rows(VALIDATION_FILE):,} validation, {test}"
    return f"{manifest.dataset}: {manifest.clients} clients, {each} · {how}, seed {manifest.seed} · {test}"


def _what(manifest: Manifest) -> str:
    return "images" if manifest.image else "rows"


def _short(name: str, length: int = 18) -> str:
    return figure_text(" ".join(name.replace("_", " ").split()), length)
