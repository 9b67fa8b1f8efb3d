"""docs/models.md: its own model trains by the command that the page prints."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from limits import LIMIT
from ranks import programs
from repository import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text()


@pytest.mark.slow
def test_a_model_of_your_own(tmp_path):
    section = PAGE.partition("## A model of your own")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "bash"]
    (tmp_path / "my_model.py").write_text(blocks[0][1])
    environment = {**os.environ, "PATH": programs(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["bash", "-euc", blocks[1][1]]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generic" not in done.stdout
    summary = json.loads((tmp_path / "runs" / "my_model" / "summary.json").read_text())
    assert summary["final"]["test_acc"] > 0.9
