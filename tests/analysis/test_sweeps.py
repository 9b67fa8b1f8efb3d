"""Heat maps of two swept settings: which there are, and what is in them."""

import json
import re

import numpy as np
from synthetic_runs import run

from fedlada_mpi.analysis import figures, page, sweeps
from fedlada_mpi.analysis.drawing import STYLES, plt
from fedlada_mpi.analysis.groups import group


def grid(lrs=(0.1, 0.2, 0.4), alphas=(0.3, 0.7), accuracy=lambda lr, alpha, seed: lr + alpha / 2 + seed / 100, **more):
    """FedCM over rates and alphas with two seeds."""
    return [
        run([0.01, accuracy(lr, alpha, seed)], algorithm="fedcm", lr=lr, alpha=alpha, seed=seed, **more)
        for lr in lrs
        for alpha in alphas
        for seed in (0, 1)
    ]


def test_the_final_accuracies_over_two_settings():
    found = group(grid())
    (one,) = sweeps.find(found)
    assert (one.x, one.columns, one.y, one.rows) == ("lr", [0.1, 0.2, 0.4], "alpha", [0.3, 0.7])
    assert np.allclose(one.means, [[25.5, 35.5, 55.5], [45.5, 55.5, 75.5]])
    assert one.extent == (one.means[0][0], one.means[1][2])
    assert [one.ink(one.means[0][0]), one.ink(one.means[0][0], reverse=True)] == ["#1d2127", "#ffffff"]
    (table,) = sweeps.tables(found)
    assert table.title == "CIFAR-10, FedCM: α and learning rate η_l"
    assert [column.full for column in table.columns] == ["α", *(f"learning rate η_l: {v}" for v in (0.1, 0.2, 0.4))]
    assert [cell.text for cell in table.rows[1]] == ["0.7", "45.50 ± 0.71", "55.50 ± 0.71", "75.50 ± 0.71"]
    assert [cell.tone for cell in table.rows[1]] == ["", "", "", "best"]


def test_validation_is_what_a_sweep_chooses_by():
    runs = grid(validation=0.1)
    for one in runs:
        one.series["val_acc"] = one.series["test_acc"] / 2
    (one,) = sweeps.find(group(runs))
    assert one.value_name == "Final validation accuracy (%)"
    assert np.isclose(one.means[0][0], 12.75)


def test_one_map_per_method_data_set_and_further_setting():
    three = {"alphas": (0.3, 0.5, 0.7)}
    runs = [*grid(**three), *grid(dataset="mine", **three), *grid(weight_decay=0.5, **three)]
    titles = [one.heading for one in sweeps.find(group(runs))]
    assert titles == ["CIFAR-10, FedCM, λ=0.001", "CIFAR-10, FedCM, λ=0.5", "mine, FedCM"]


def test_settings_that_were_varied_one_at_a_time_have_no_map():
    cross = [r for r in grid() if r.settings["lr"] == 0.1 or r.settings["alpha"] == 0.3]
    assert sweeps.find(group(cross)) == []
    assert sweeps.find(group(grid(alphas=(0.3,)))) == []


def test_a_sweep_at_work_has_the_cells_that_can_be_compared():
    """A row of three, one of two; the single cell of the third row has nothing to be compared with."""
    begun = [(0.1, 0.3), (0.2, 0.3), (0.4, 0.3), (0.1, 0.5), (0.2, 0.5), (0.1, 0.7)]
    runs = grid(alphas=(0.3, 0.5, 0.7))
    (one,) = sweeps.find(group([r for r in runs if (r.settings["lr"], r.settings["alpha"]) in begun]))
    assert (one.columns, one.rows) == ([0.1, 0.2], [0.3, 0.5])
    begun.append((0.4, 0.7))
    (one,) = sweeps.find(group([r for r in runs if (r.settings["lr"], r.settings["alpha"]) in begun]))
    assert [[cell is not None for cell in row] for row in one.cells] == [
        [True] * 3,
        [True, True, False],
        [True, False, True],
    ]
    assert one.means[1][2] is None


def test_picture_page_and_table_have_the_same_numbers():
    found = group(grid(lrs=(0.1, 0.2)))
    (one,) = sweeps.find(found)
    assert one.name in [name for name, _ in figures.plan(found)]
    drawing = figures._heat_map(one, STYLES["screen"])
    assert [text.get_text() for text in drawing.axes[0].texts] == ["25.5", "35.5", "45.5", "55.5"]
    plt.close(drawing)
    text = page.render(found, sweeps.tables(found), [one.name], "runs")
    assert f'data-map="{one.name}"' in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))["maps"][one.name]
    assert data["means"] == [[25.5, 35.5], [45.5, 55.5]]
    assert data["shown"][0][0] == "25.50 ± 0.71"
    assert data["y"]["ticks"] == ["0.3", "0.7"]
