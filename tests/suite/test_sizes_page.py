"""docs/sizes.md: its tables are those of the code, and its commands run."""

from __future__ import annotations

import json
import os
import re
import runpy
import statistics
import subprocess

import pytest
from limits import LIMIT
from ranks import programs
from repository import ROOT
from sizes_table import MODELS, models, vectors

PAGE = (ROOT / "docs" / "sizes.md").read_text()


def test_vectors_of_the_methods():
    assert vectors() in PAGE, "python tests/helpers/sizes_table.py prints the table as it should be"


@pytest.mark.slow
def test_sizes_of_the_models():
    assert models(MODELS) in PAGE, "python tests/helpers/sizes_table.py prints the table as it should be"


def test_numbers_in_the_text():
    """ResNet-18 with FedLADA: 10 participants, two vectors each way, 11 ranks; checkpoints of it and of SCAFFOLD."""
    d = 4 * 11_181_642
    for text, value in {
        "= 895 MB down": 10 * 2 * d / 1e6,
        "= 1.79 GB.": 10 * 4 * d / 1e9,
        "= 4.6 GB each": 102 * d / 1e9,
        "= 134 MB.": 3 * d / 1e6,
    }.items():
        assert text in PAGE
        shown = text.split()[1]
        assert shown == f"{value:.{len(shown.partition('.')[2])}f}"


@pytest.mark.slow
def test_the_commands(tmp_path):
    """In an empty folder, to which they add the data."""
    blocks = re.findall(r"^```(bash|text)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["bash", "bash", "text"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PRTE_", "FEDLADA_"))}
    environment |= {"PATH": programs(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for _, code in blocks[:2]:
        done = subprocess.run(
            ["bash", "-euc", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["data"]
    shown, printed = blocks[2][1].splitlines(), done.stdout.splitlines()
    measured = re.compile(r"[\d.]+ (?:s|min|h|MB|GB)( [\d.]+ (?:s|min))?|\d+%")
    assert [measured.sub("#", line) for line in shown] == [measured.sub("#", line) for line in printed]
    assert [line for line in shown if "bytes" in line] == [line for line in printed if "bytes" in line]


@pytest.mark.parametrize("file", ["cpu-estimates.json", "h200-estimates.json"])
def test_the_table_of_what_was_measured(file):
    path = ROOT / "docs" / "bench" / "estimates.py"
    namespace = runpy.run_path(str(path))
    report = json.loads((path.parent / file).read_text())
    assert namespace["table"](report["results"]) in PAGE
    for row in report["results"]:
        for part in {"round", "total", "host_memory"} & row.keys():
            estimated, measured = (statistics.median(row[part][how]) for how in ("estimated", "measured"))
            assert abs(estimated / measured - 1) <= 0.2, (row["case"], part)
        assert all(row["bytes"].values())
