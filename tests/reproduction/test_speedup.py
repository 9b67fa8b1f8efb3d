"""The linear speed-up, by hand."""

import math

import numpy as np
import pytest
from synthetic_runs import run

from fedlada_mpi.analysis import measures
from fedlada_mpi.analysis.groups import group
from fedlada_mpi.experiments import load
from fedlada_mpi.reproduction import speedup


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
    assert table.notes[-2] == "Training loss 0.5: at least 50 % of the ideal up to S K = 100."
    assert "theorem: 0 of 4 cells" in table.notes[-1]  # with beta1 = 0.9 it needs K > 9, and more rounds


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
    assert measures.rounds_to("train_loss", 0.5)(one) == 3
    assert measures.rounds_to("train_loss", 0.4)(one) == math.inf
    assert measures.rounds_to("train_loss", 1.0)(one) == 1


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
