"""docs/methods.md: its table is that of the classes, and its tutorial does what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from limits import LIMIT
from methods_table import code_lines, rates_table, table
from ranks import programs
from repository import ROOT

PAGE = (ROOT / "docs" / "methods.md").read_text()


def test_tables_of_the_methods():
    for made in (table(), rates_table()):
        assert made in PAGE, "python tests/helpers/methods_table.py prints the tables as they should be"


def test_lines_of_code():
    assert code_lines('"""Prose.\n\nmore"""\n\n# why\nx = 1\n\n\ndef f():\n    """Prose."""\n    return x\n') == 3


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_tutorial(tmp_path):
    """Its files and commands, literally, in an empty directory."""
    tutorial = PAGE.partition("## A method of your own")[2].partition("### What a round calls, in order")[0]
    blocks = re.findall(r"^```(python|toml|bash)\n(.*?)^```", tutorial, re.MULTILINE | re.DOTALL)
    files = {"python": iter(("my_method.py", "fedexp.py", "sparse.py")), "toml": iter(("compare.toml",))}
    kinds = ["python", "bash", "bash", "toml", "bash", "bash", *("python", "bash") * 2]
    assert [kind for kind, _ in blocks] == kinds
    paths = {"PATH": programs(), "PYTHONPATH": str(ROOT)}
    shown = ""
    for kind, text in blocks:
        if kind in files:
            (tmp_path / next(files[kind])).write_text(text)
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", text],
            cwd=tmp_path,
            env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        shown += done.stdout
    assert "settings of my_method.py:Tether:\n  --pull PULL" in shown
    assert re.search(r"^pull +0.2 +preset digits, my_method.py:Tether$", shown, re.MULTILINE)
    assert "resumed after round 2" in shown
    assert "4 runs of 4 settings" in shown
    assert "my_method.py:Tether round, 10 participants" in shown
    fedexp = json.loads((tmp_path / "runs" / "fedexp" / "summary.json").read_text())
    assert fedexp["final"]["test_acc"] > 0.9
    tables = "".join(path.read_text() for path in (tmp_path / "report" / "tables").glob("*.md"))
    for name in ("FedAvg", "FedLADA", "Tethered FedAvg pull=0.05", "Tethered FedAvg pull=0.5"):
        assert f"| {name} |" in tables
