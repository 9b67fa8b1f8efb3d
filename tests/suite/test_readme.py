"""The README's commands, as they are printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from limits import LIMIT
from ranks import programs

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_commands(tmp_path, digits_dir):
    """In a folder where the quickstart has been: its virtual environment, its data and its run."""
    text = (ROOT / "README.md").read_text()
    quickstart, after, own = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert quickstart.startswith("bash jobs/quickstart.sh ")
    assert after.startswith(". .venv/bin/activate\n")
    (method,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(method.strip().splitlines()) <= 10
    (tmp_path / "my_method.py").write_text(method)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={programs()}\n")
    (tmp_path / "data").symlink_to(digits_dir.parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_"))}
    done = subprocess.run(
        ["bash", "-euc", after + own], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stdout + done.stderr
    prox = json.loads((tmp_path / "runs/digits-Prox-seed0/summary.json").read_text())
    assert (prox["rounds"], prox["final"]["test_acc"] > 0.9) == (60, True)
    summary = json.loads((tmp_path / "runs/digits-scaffold-seed0/summary.json").read_text())
    assert summary["rounds"] == 30
    assert [(s["from"], s["to"], s["ranks"]) for s in summary["segments"]] == [(1, 20, 4), (21, 30, 1)]
    assert summary["final"]["test_acc"] > 0.8
    assert (tmp_path / "report/index.html").is_file()
