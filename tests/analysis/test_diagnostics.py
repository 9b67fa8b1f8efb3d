"""The report's diagnostics: figures and tables only of what was recorded."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from synthetic_runs import rows_of, run, write_run

from fedlada_mpi.analysis import figures, page, run_tables
from fedlada_mpi.analysis.groups import group
from fedlada_mpi.report import build
from fedlada_mpi.reproduction import speedup
from fedlada_mpi.rundir.columns import DIAGNOSED


def diagnosed(directory, method: str, numbers: dict[int, dict[str, float]]) -> None:
    """A run of four rounds, with numbers of some of them."""
    write_run(directory, {"dataset": "digits", "algorithm": method, "rounds": 4}, 4)
    path = directory / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [{**record, **dict.fromkeys(DIAGNOSED), **numbers.get(record["round"], {})} for record in records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_diagnostics_are_shown_where_they_were_recorded(tmp_path):
    first = dict.fromkeys(DIAGNOSED, 0.5) | {"step_cosine": None, "direction_cosine": None, "step_change": None}
    diagnosed(tmp_path / "runs" / "a", "fedcm", {2: first, 4: dict.fromkeys(DIAGNOSED, 0.25)})
    write_run(tmp_path / "runs" / "b", {"dataset": "digits", "algorithm": "fedavg", "rounds": 4}, 4)
    build([tmp_path / "runs"], tmp_path / "report")
    assert (tmp_path / "report" / "figures" / "diagnostics_digits.png").is_file()
    text = (tmp_path / "report" / "index.html").read_text()
    assert 'id="diagnostics"' in text
    assert "figures/diagnostics_digits.png" in text
    (row,) = rows_of(tmp_path / "report" / "tables" / "diagnostics.csv")
    assert row["Method"] == "FedCM"
    assert float(row["Client drift / squared global step"]) == 0.375
    assert float(row["Cosine of g_a and the true gradient"]) == 0.25


def test_without_any_there_is_nothing_to_show():
    found = group([run([0.1, 0.2])])
    names = [name for name, _ in figures.plan(found)]
    assert not any(name.startswith("diagnostics") for name in names)
    assert run_tables.diagnostics(found).rows == speedup.tables(found) == []
    assert 'id="diagnostics"' not in page.render(found, [], names, "runs")


def test_many_diagnosed_groups_are_drawn_apart():
    runs = []
    for mu in range(11):
        one = run([0.1, 0.2], algorithm="fedprox", mu=float(mu))
        one.series["drift"] = np.array([math.nan, 2.0])
        one.series["step_cosine"] = np.array([0.5, 0.4])
        runs.append(one)
    names = [name for name, _ in figures.plan(group(runs))]
    assert {"drift_cifar_10", "step_cosine_cifar_10"} <= set(names)
    assert "drift_ratio_cifar_10" not in names
