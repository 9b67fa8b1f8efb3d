"""The data that ships with the package, as the commands of the pages train on it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedlada_mpi.data.sources.embedded import load_randhie
from fedlada_mpi.run import main


def pooled_deviance() -> float:
    """The least mean Poisson deviance of a linear model of all training rows together, by Newton's method."""
    data = load_randhie()
    inputs, visits = data.inputs.astype(float), data.targets.astype(float)
    rows = np.column_stack([(inputs - inputs.mean(0)) / inputs.std(0), np.ones(len(inputs))])
    model = np.zeros(rows.shape[1])
    model[-1] = np.log(visits.mean())
    for _ in range(20):
        mean = np.exp(rows @ model)
        model -= np.linalg.solve((rows * mean[:, None]).T @ rows, rows.T @ (mean - visits))
    logs = rows @ model
    of_itself = visits * np.log(np.maximum(visits, 1))
    return float(2 * np.mean(of_itself - visits * logs - visits + np.exp(logs)))


@pytest.mark.slow
def test_federated_visits_are_within_one_per_cent_of_pooled_ones(tmp_path):
    words = ["--dataset", "randhie", "--task", "regression", "--loss", "poisson", "--algorithm", "fedavg"]
    assert main([*words, "--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "run")]) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["train_deviance"] == pytest.approx(pooled_deviance(), rel=0.01)


@pytest.mark.parametrize("dataset", ["dd", "digit-masks", "digit-mosaics"])
def test_a_round_of_each(dataset, tmp_path):
    """Without a word about task, model or rates."""
    words = [
        "--dataset",
        dataset,
        "--rounds",
        "1",
        "--data-dir",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(words) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
