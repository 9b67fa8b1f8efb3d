"""Colours, dashes and markers of groups: apart on white, on black, in grey and for colour-blind readers."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_run

from fedlada_mpi.analysis import page, series
from fedlada_mpi.report import build

BLACK = "#15181c"  # the dark page
# Machado, Oliveira and Fernandes (2009), full protanopia, deuteranopia and tritanopia, in linear RGB.
SIGHTS = (
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
)


def linear(colour):
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(rgb):
    cones = np.array(
        [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
    )
    axes = np.array(
        [
            [0.21045426, 0.79361779, -0.00407205],
            [1.9779985, -2.42859221, 0.45059371],
            [0.02590404, 0.78277177, -0.80867577],
        ]
    )
    return axes @ np.cbrt(cones @ np.clip(rgb, 0, 1))


def contrast(one, other):
    light, dark = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("which", "background"), [("colour", "#ffffff"), ("dark", BLACK)])
def test_the_first_eight_colours_stay_apart(which, background):
    first = [getattr(look, which) for look in series.LOOKS[:8]]
    assert len(set(first)) == 8
    assert min(contrast(colour, background) for colour in first) >= 3  # WCAG, for graphics
    for one, other in combinations(map(linear, first), 2):
        assert min(np.linalg.norm(oklab(sight @ one) - oklab(sight @ other)) for sight in SIGHTS) >= 0.09


def test_in_grey_the_dash_or_the_lightness_differs():
    for one, other in combinations(series.LOOKS[:8], 2):
        assert one.marker != other.marker
        lightness = [oklab(linear(look.colour))[0] for look in (one, other)]
        assert one.dash != other.dash or abs(lightness[0] - lightness[1]) >= 0.15
    assert len(set(series.LOOKS)) == len(series.LOOKS) == 32


def test_text_on_the_page_has_contrast():
    css = page._text("page.css")
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in css.split("@media (prefers-color-scheme: dark)")
    )
    for colours in (light, {**light, **dark}):
        for text in ("ink", "muted", "accent", "better", "worse"):
            assert min(contrast(colours[text], colours[on]) for on in ("paper", "soft")) >= 4.5, (text, colours)


@pytest.mark.slow
def test_figures_for_a_paper(tmp_path: Path):
    """As wide as a column or the text, as a vector graphic, with a caption instead of a title."""
    for seed in (0, 1):
        write_run(
            tmp_path / f"runs/{seed}", {"dataset": "cifar10", "algorithm": "fedavg", "seed": seed, "rounds": 3}, 3
        )
    build([tmp_path / "runs"], tmp_path / "report", style="paper")
    folder = tmp_path / "report/figures"
    widths = {
        p.stem: round(float(re.search(r'width="([\d.]+)pt"', p.read_text())[1]) / 72, 6) for p in folder.glob("*.svg")
    }
    assert set(widths.values()) <= {3.4, 7.0}
    assert widths["curves_cifar_10"] == 7.0
    text = (tmp_path / "report/index.html").read_text()
    for name in widths:
        assert f'<a href="figures/{name}.pdf">PDF</a>, <a href="figures/{name}.tex">LaTeX</a>' in text
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert r"\caption{" in (folder / f"{name}.tex").read_text()
    assert "standard deviation" not in (folder / "curves_cifar_10.svg").read_text()
    assert r"$\pm$ standard deviation of 2 seeds" in (folder / "curves_cifar_10.tex").read_text()
