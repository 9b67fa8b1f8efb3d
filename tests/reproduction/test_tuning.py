"""The rule by which the tuned presets were chosen."""

import pytest
from synthetic_runs import run

from fedlada_mpi.analysis.groups import group
from fedlada_mpi.reproduction import tuning


def test_the_rule_of_tuning():
    """Means over rounds 151 to 200 by hand: 0.6, 0.7 and, where seed 1 has no counterpart, that of seed 0 alone."""
    early, late = [0.9] * 150, [0.5, 0.7] * 25
    runs = [run([*early, *late]), run([*early, *[0.2] * 50], seed=1)]
    assert tuning.measured(group(runs)) == {}
    runs.append(run([*early, *[0.7] * 50, 0.1], weight_decay=2e-3))
    assert tuning.measured(group(runs))["fedavg"] == pytest.approx({1e-3: 60.0, 2e-3: 70.0})
    assert tuning.chosen(group(runs)) == {"fedavg": 2e-3}
    rows = tuning.table(group(runs)).rows
    assert [[cell.text for cell in row] for row in rows] == [["FedAvg", "0.001", "60.00", "70.00", "0.002"]]
    other = [run([0.8] * 200, weight_decay=5e-3, lr=0.2), run([0.8] * 200, weight_decay=5e-3, dataset="cifar100")]
    assert {*tuning.measured(group([*runs, *other]))["fedavg"]} == {1e-3, 2e-3}
    short = run([0.9] * 199, weight_decay=5e-3)
    assert tuning.chosen(group([*runs, short])) == {}
