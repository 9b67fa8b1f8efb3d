"""The pictures in docs/report, from the runs of three grids:

    python -m fedlada_mpi.grid digits --all -n 4 --set eval_clients=10
    python -m fedlada_mpi.grid diagnostics --all --set seed=0
    python -m fedlada_mpi.grid speedup --all --set seed=0 --set data_dir=data/hundred
    python docs/make/pictures.py runs/digits runs/diagnostics runs/speedup

Figures are those of the report, in 128 colours; the page is shown as Chromium does, light, dark and on a phone.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "tests/helpers")]

from browser import Browser  # noqa: E402 (from tests/helpers)

from fedlada_mpi.report import build  # noqa: E402

FOLDER = ROOT / "docs/report"
# Width and height of the window, and whether it is dark.
SCREENS = {"page": (1280, 1200, False), "page_dark": (1280, 1200, True), "page_phone": (390, 1200, False)}
COLOURS = 128
FIGURES = {
    f"{kind}_digits": f"{kind}_digits" for kind in ("curves", "clients", "silos", "phases", "ranks", "diagnostics")
}
FIGURES["speedup_digits"] = "speedup_digits_clients_100_fedlada"


def screenshots(page: Path, folder: Path) -> None:
    """The top of a page on each of the screens."""
    for name, (width, height, dark) in SCREENS.items():
        with tempfile.TemporaryDirectory() as profile, Browser(Path(profile), width, height, dark) as browser:
            browser.open(page, "document.body.dataset.drawn > 0")
            browser.run("new Promise(done => setTimeout(done, 1500))")  # charts are drawn one after another
            browser.picture(folder / f"{name}.png")
        reduce(folder / f"{name}.png")


def reduce(picture: Path) -> None:
    """To a palette, which curves and text do not need more of."""
    Image.open(picture).convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def main(*runs: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder, str(number)) for number in range(len(runs))]
        for grid, report in zip(runs, reports, strict=True):
            build([grid], report)
        for name, figure in FIGURES.items():
            # The first report that has it: several have curves of the digits.
            drawn = next(path for report in reports if (path := report / f"figures/{figure}.png").exists())
            shutil.copy(drawn, FOLDER / f"{name}.png")
            reduce(FOLDER / f"{name}.png")
        screenshots(reports[0] / "index.html", FOLDER)


if __name__ == "__main__":
    main(*sys.argv[1:])
