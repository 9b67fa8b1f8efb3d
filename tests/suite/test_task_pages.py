"""Tasks, adapters, hospitals and tuning in docs/: every command and program runs, and prints what the page shows."""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

import pytest
from limits import LIMIT
from ranks import programs, python
from repository import ROOT

PAGES = [
    "tasks.md",
    "adapters.md",
    "hospitals.md",
    "tuning.md",
    *(f"tasks/{path.name}" for path in sorted((ROOT / "docs/tasks").glob("*.md"))),
]
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?")
CLOSE = 0.05  # results differ from machine to machine by rounding, which training amplifies


def texts(folder: Path) -> None:
    """What readers have themselves: letters, patients and a trial."""
    draw = random.Random(0)
    words = ["dear", "friend", "the", "weather", "is", "fine", "and", "we", "are", "well"]
    (folder / "letters").mkdir()
    for name in ("Ada", "Bea", "Cas"):
        (folder / "letters" / f"{name}.txt").write_text(" ".join(draw.choices(words, k=2000)))
    patients, trial = ["clinic,age,weight,diabetes,asthma,anaemia"], ["centre,age,dose,died,days"]
    for row in range(300):
        age, place = draw.randint(30, 80), "ABC"[row % 3]
        days = draw.expovariate(0.01 * (1 + age / 40))
        patients.append(f"{place},{age},{draw.randint(50, 100)},{int(age > 60)},{row % 2},{int(row % 5 == 0)}")
        trial.append(f"{place},{age},{draw.random():.2f},{int(days < 150)},{min(days, 150):.1f}")
    (folder / "patients.csv").write_text("\n".join(patients))
    (folder / "trial.csv").write_text("\n".join(trial))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_page(name, tmp_path):
    texts(tmp_path)
    page = (ROOT / "docs" / name).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} <= {"bash", "python", "text"}
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PRTE_", "FEDLADA_"))
    }
    environment |= {"PATH": programs(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    printed = ""
    for kind, code in blocks:
        if kind == "text":
            assert_shown(code, printed)
            continue
        if file := re.match(r"# (\w+\.py)\n", code):
            (tmp_path / file[1]).write_text(code)
            continue
        (tmp_path / "block.py").write_text(code)
        words = ["bash", "-euc", code] if kind == "bash" else [python(), "block.py"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, code + done.stdout + done.stderr
        assert "Warning" not in done.stderr
        printed = done.stdout
    if "fedlada_mpi.report" in page:
        assert (tmp_path / "report/index.html").is_file()
        for place in re.findall(r"^\| (\w+) \| \d", page, re.MULTILINE):
            assert place in (tmp_path / "report/tables/silos.md").read_text()


def assert_shown(text: str, printed: str) -> None:
    """Each line is among those printed, in the same words and with about the same numbers."""
    found = [(masked(line), numbers(line)) for line in printed.splitlines()]
    for line in text.splitlines():
        close = pytest.approx(numbers(line), rel=CLOSE, abs=0.02)
        alike = [given for words, given in found if words == masked(line) and given == close]
        assert alike, f"{line}\nis not in\n{printed}"


def masked(line: str) -> str:
    return " ".join(NUMBER.sub("#", line).split())


def numbers(line: str) -> list[float]:
    """Without the seconds of a round, and the number of the best round."""
    found = [float(word.replace(",", "")) for word in NUMBER.findall(line)]
    return found[:-1] if line.strip().startswith(("round", "test")) else found
