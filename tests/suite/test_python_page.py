"""docs/python.md and docs/notebook.ipynb: every example runs and does what the text says."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from limits import LIMIT
from ranks import python
from repository import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def blocks() -> tuple[list[str], str]:
    """The Python of the page, and the script that it starts on several ranks."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    scripts = [text for text in code if text.startswith("# script.py\n")]
    assert len(scripts) == 1
    return [text for text in code if text not in scripts], scripts[0]


@pytest.mark.slow
def test_examples_of_the_page(tmp_path):
    code, _ = blocks()
    (tmp_path / "page.py").write_text("\n".join(code) + "\nprint([r.config['seed'] for r in runs], torch.rand(1))\n")
    done = subprocess.run(
        [python(), "page.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unknown setting 'round' (did you mean 'rounds'?)" in done.stdout
    assert "resumed after round 20" in done.stdout
    assert re.search(r"^stopped \d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^\[0, 1\] ", done.stdout, re.MULTILINE)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        *("first", "stopped", "tether", "perceptron", "module", "arrays", "table", "relative", "validated"),
        *("seed0", "seed1"),
    }


@pytest.mark.slow
def test_the_script_on_ranks(mpirun, tmp_path):
    assert "mpirun -n 4 python script.py" in PAGE
    (tmp_path / "script.py").write_text(blocks()[1])
    # Whole lines, also where PYTHONUNBUFFERED is set: pieces of what two ranks print at once may be mixed.
    done = mpirun(2, command=("script.py",), cwd=tmp_path, check=True, env={"PYTHONUNBUFFERED": ""})
    assert done.stdout.count("2 ranks") == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_notebook(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    stored = [cell.get("outputs", []) for cell in notebook.cells]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell, before in zip(notebook.cells, stored, strict=True):
        assert kinds(cell.get("outputs", [])) == kinds(before), cell.source


def kinds(outputs) -> set[str]:
    """What a cell shows: text that it prints, values, pictures."""
    return {kind for output in outputs for kind in output.get("data", [output.get("name")])}
