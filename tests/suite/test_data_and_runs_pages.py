"""docs/data.md and docs/runs.md: their programs and commands, as they are printed."""

from __future__ import annotations

import os
import re
import subprocess

import numpy as np
import pytest
from limits import LIMIT
from PIL import Image
from ranks import programs
from repository import ROOT


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_programs_of_the_data_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLADA_DATA", raising=False)
    found: dict = {}
    for code in blocks("data.md", "python"):
        exec(code, found)
    assert len([*tmp_path.glob("data/digits/silo_*.h5")]) == 4
    assert found["shard"].client_ids.tolist() == [3, 4, 5]
    assert found["images"].shape == (30, 8, 8, 1)


@pytest.mark.slow
def test_the_commands_of_the_runs_page(tmp_path, monkeypatch):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PRTE_", "FEDLADA_"))}
    environment |= {"PATH": programs(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "new.png")
    code = "".join(blocks("runs.md", "bash"))
    done = subprocess.run(
        ["bash", "-euc", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^new\.png +[\d.]+%  \d$", done.stdout, re.MULTILINE)
    assert (tmp_path / "runs/first/best.pt").is_file()
    monkeypatch.chdir(tmp_path)
    for program in blocks("runs.md", "python"):
        exec(program, {})
