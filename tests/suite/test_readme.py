"""The README's first commands, as they are printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from ranks import programs

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_commands_after_the_quickstart(tmp_path, digits_dir):
    """In a folder where the quickstart has been: its virtual environment, its data and its run."""
    section = (ROOT / "README.md").read_text().split("## Two commands")[1].split("\n## ")[0]
    quickstart, after = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    assert quickstart.startswith("bash jobs/quickstart.sh ")
    assert after.startswith(". .venv/bin/activate\n")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={programs()}\n")
    (tmp_path / "data").symlink_to(digits_dir.parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_"))}
    done = subprocess.run(
        ["bash", "-euc", after], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/digits-scaffold-seed0/summary.json").read_text())
    assert summary["rounds"] == 30
    assert [(s["from"], s["to"], s["ranks"]) for s in summary["segments"]] == [(1, 20, 4), (21, 30, 1)]
    assert summary["final"]["test_acc"] > 0.8
    assert (tmp_path / "report/index.html").is_file()
