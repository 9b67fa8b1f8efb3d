"""The report's diagnostics: figures only of what was recorded, and the arithmetic of the speed-up."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from synthetic_runs import write_run
from test_report import rows_of, run

from fedlada_mpi.experiments import load
from fedlada_mpi.report import build, figures, measures, page, speedup, tables
from fedlada_mpi.report.groups import group
from fedlada_mpi.rundir.columns import DIAGNOSED


def diagnosed(directory, method: str, numbers: dict[int, dict[str, float]]) -> None:
    """A run of four rounds, with numbers of some of them."""
    write_run(directory, {"dataset": "digits", "algorithm": method, "rounds": 4}, 4)
    path = directory / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [{**record, **dict.fromkeys(DIAGNOSED), **numbers.get(record["round"], {})} for record in records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


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
    assert tables.diagnostics(found).rows == speedup.tables(found) == []
    assert page._diagnostics(found, [], names, page._files) == ""


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


def cell(s: int, k: int, rounds_to_half: int | None, length: int = 40, seed: int = 0, **more):
    """A run whose training loss falls to 0.5 in that round."""
    one = run([0.1] * length, seed=seed, algorithm="fedlada", participation=s / 100, local_steps=k, **more)
    loss = np.full(length, 1.0)
    if rounds_to_half:
        loss[rounds_to_half - 1 :] = 0.5
    one.series["train_loss"] = loss
    return one


def test_speed_up_by_hand():
    """20 rounds at S K = 25: ideally 10 at 50 and 5 at 100."""
    runs = [cell(5, 5, 20), cell(10, 5, 10), cell(5, 10, 16), cell(10, 10, 8)]
    (grid,) = speedup.grids(group(runs))
    assert [(p.s, p.k, p.product) for p in grid.points] == [(5, 5, 25), (5, 10, 50), (10, 5, 50), (10, 10, 100)]
    assert grid.levels == [1.5, 1.0, 0.5]
    assert [grid.speedup(p, 0.5) for p in grid.points] == [(1.0, 1.0), (1.25, 0.625), (2.0, 1.0), (2.5, 0.625)]
    assert grid.linear_until(0.5) == 100
    (table,) = speedup.tables(group(runs))
    assert [c.text for c in table.rows[3]][:5] == ["10", "10", "100", "0.001", "1"]
    assert [c.text for c in table.rows[3]][-3:] == ["8", "2.5", "62"]
    assert table.notes[-1] == "Training loss 0.5: at least 50 % of the ideal up to S K = 100."


def test_where_the_speed_up_ends():
    runs = [cell(5, 5, 20), cell(10, 5, 10), cell(5, 10, 10), cell(10, 10, 11), cell(20, 10, None)]
    (grid,) = speedup.grids(group(runs))
    assert grid.speedup(grid.points[-1], 0.5) is None
    assert grid.speedup(grid.points[-2], 0.5) == (20 / 11, 5 / 11)
    assert grid.linear_until(0.5) == 50
    (table,) = speedup.tables(group(runs))
    assert [c.text for c in table.rows[-1]][-3:] == ["> 40", "–", "–"]


def test_speed_ups_are_relative_to_the_first_cell_that_got_there():
    runs = [cell(5, 5, None), cell(10, 5, 20), cell(5, 10, 20), cell(10, 10, 10)]
    (grid,) = speedup.grids(group(runs))
    assert [grid.speedup(p, 0.5) for p in grid.points] == [None, (1.0, 1.0), (1.0, 1.0), (2.0, 1.0)]
    assert grid.linear_until(0.5) == 100


def test_seeds_are_averaged_and_a_part_of_them_does_not_count():
    runs = [cell(5, 5, n, seed=i) for i, n in enumerate((18, 22))]
    runs += [cell(10, 10, 5), cell(10, 10, None, seed=1), cell(10, 5, 10), cell(5, 10, 10)]
    (grid,) = speedup.grids(group(runs))
    assert grid.points[0].mean(0.5) == 20
    assert grid.points[-1].mean(0.5) is None


def test_only_grids_of_both_are_speed_ups():
    assert speedup.grids(group([cell(5, 5, 20), cell(10, 5, 10)])) == []
    assert speedup.grids(group([cell(5, 5, 20), cell(5, 10, 10)])) == []
    other = [cell(5, 5, 20), cell(10, 5, 10), cell(5, 10, 10, weight_decay=0.5)]
    assert speedup.grids(group(other)) == []


def test_a_loss_is_reached_from_above():
    one = cell(5, 5, 3, length=4)
    assert measures.rounds_to("train_loss", 0.5, below=True)(one) == 3
    assert measures.rounds_to("train_loss", 0.4, below=True)(one) == math.inf
    assert measures.rounds_to("train_loss", 1.0, below=True)(one) == 1


@pytest.mark.parametrize("dataset", ["digits", "cifar10"])
def test_the_rates_of_the_experiment_are_the_corollarys(dataset):
    """With S K T = 20,000: eta_l = c sqrt(1 / (K T)) and K eta_g eta_l = c' sqrt(S K / T)."""
    cells = {}
    for each in load("speedup", changes={"dataset": dataset, "seed": 0}).runs:
        s, k = round(100 * each.given["participation"]), each.given["local_steps"]
        rounds = 20_000 / (s * k)
        assert each.given["lr"] == pytest.approx(0.0447 * math.sqrt(1 / (k * rounds)), rel=1e-3)
        both = k * each.given["server_lr"] * each.given["lr"]
        assert both == pytest.approx(0.316 * 0.0447 * math.sqrt(s * k / rounds), rel=2e-3)
        assert each.rounds == max(40, rounds)
        cells[s, k] = each
    assert len(cells) == 16
    assert (cells[10, 5].given["lr"], cells[10, 5].given["server_lr"]) == (0.001, 1.0)
