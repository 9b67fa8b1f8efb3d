"""docs/differential-privacy.md: its command runs, and its tables are what the code has."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from repository import ROOT

from fedlada_mpi import algorithms
from fedlada_mpi.run import main

PAGE = (ROOT / "docs/differential-privacy.md").read_text()


def test_every_method_is_in_the_table():
    table = PAGE.partition("## Methods")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", table, re.MULTILINE))
    for name in algorithms.names():
        cls = algorithms.find(name)
        (said,) = (text for methods, text in rows.items() if re.search(_whole(cls.title()), methods))
        assert bool(cls.dp.refused) == said.startswith("refused"), name
        assert bool(cls.dp.warning) == ("warning" in said), name
        assert cls.dp.fixed_steps == ("--local-steps K" in said), name


def _whole(title: str) -> str:
    """The title as a word of its own, of which a longer one is no case: FedAdam is not FedAdam(*)."""
    return rf"(?<![\w-]){re.escape(title)}(?![\w(*])(?! with)"


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^```bash\npython -m fedlada_mpi.run (.*?)\n```", PAGE, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert "of a mean 1 x the clip in all" in capsys.readouterr().out
    summary = json.loads((tmp_path / "runs/private/summary.json").read_text())
    assert summary["privacy"]["epsilon"] <= 8
    stated = float(re.search(r"\| epsilon 8 \| ([\d.]+) %", PAGE)[1])
    assert summary["final"]["test_acc"] == pytest.approx(stated / 100, abs=0.04)
