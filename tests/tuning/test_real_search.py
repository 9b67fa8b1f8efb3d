"""Searches on the digits, whose runs really train; in this process, which saves their start."""

import json
import os

import numpy as np
import pytest
import torch

import fedlada_mpi
from fedlada_mpi import run, tune
from fedlada_mpi.tuning import running
from fedlada_mpi.tuning.search import Ended

PLAN = """
[base]
algorithm = "fedavg"
clients = 4
participation = 0.5
local_steps = 3
clip = 0
checkpoint_every = 0
eval_every = 2
lr_schedule = "cosine"
device = "cpu"
[search]
lr = [0.01, 0.3, 1e11]
[tune]
strategy = "halving"
trials = 3
rounds = 4
factor = 2
first_rounds = 1
validation = 0.2
seeds = 2
"""


def here(*_, **__):
    def start(runs):
        statuses = {i: run.main([*each.command()[3:]]) for i, each in enumerate(runs)}
        return Ended(0, {i: status for i, status in statuses.items() if status})

    return start


@pytest.fixture
def plan(tmp_path, shared_tmp, monkeypatch):
    monkeypatch.setattr(running, "at_once", here)
    monkeypatch.setattr(running, "in_place", here)
    monkeypatch.setenv("FEDLADA_DATA", str(shared_tmp / "tune-data"))
    (tmp_path / "plan.toml").write_text(PLAN)
    return str(tmp_path / "plan.toml")


def metrics(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_search_from_the_command(plan, tmp_path, capsys):
    out = tmp_path / "out"
    assert tune.main([plan, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    trials = {json.loads((d / "config.json").read_text())["lr"]: d for d in (out / "trials").iterdir()}
    # One diverges, one is left out after round 1, and one goes on.
    assert json.loads((trials[1e11] / "failure.json").read_text()) == {"rounds": 1, "status": 3}
    (rate,) = [lr for lr, directory in trials.items() if len(metrics(directory)) == 4]
    went_on = metrics(trials[rate])
    # No trial has seen the test set, and the winner's runs once.
    assert all(r["test_acc"] is None for d in trials.values() if (d / "metrics.jsonl").exists() for r in metrics(d))
    for directory in (out / "winner").iterdir():
        assert [r["round"] for r in metrics(directory) if r["test_acc"] is not None] == [4]
    # To the bit the run that has all rounds at once, from the file of the winner's settings.
    words = ["--config", str(out / "tuned.toml"), "--eval-train-every", "0", "--out", str(tmp_path / "whole")]
    assert run.main(words) == 0
    one, other = (torch.load(d / "model.pt", weights_only=True) for d in (trials[rate], tmp_path / "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert went_on[-1]["val_acc"] == metrics(tmp_path / "whole")[-1]["val_acc"]
    # The mean and the spread of the test results are those of the two seeds.
    tests = [metrics(directory)[-1]["test_acc"] for directory in (out / "winner").iterdir()]
    assert f"test accuracy {np.mean(tests):.2%} ± {np.std(tests, ddof=1):.2%}, 2 seeds" in printed
    assert "diverged" in (out / "tune.html").read_text()
    assert (out / "figures" / "landscape_fedavg.png").stat().st_size > 5000
    before = (out / "tune.json").read_text()
    assert tune.main([plan, "--out", str(out)]) == 0
    assert (out / "tune.json").read_text() == before
    capsys.readouterr()
    assert tune.main([plan, "--out", str(out), "--status"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["fedavg", "lr", "rounds", "round", "1", "round", "4"]
    assert [line.split()[-1] for line in shown[1:4]].count("winner") == 1
    assert shown[-1] == "finished"


def test_from_python_and_by_stages(plan, tmp_path, capsys):
    """The stages of an array job lead to what the function returns."""
    found = fedlada_mpi.tune(plan, out=tmp_path / "python", quiet=True)
    assert "stage 1 of 3" not in capsys.readouterr().out
    out = ["--out", str(tmp_path / "arrays")]
    assert tune.main([plan, *out, "--todo"]) == 0
    stages = capsys.readouterr().out.splitlines()
    assert stages == ["0 0-2", "1 0", "2 0-1"]
    for stage, number in ((0, 2), (0, 0), (0, 1), (1, 0), (2, 1), (2, 0)):
        assert tune.main([plan, *out, "--stage", str(stage), "--index", str(number)]) == 0
    capsys.readouterr()
    assert tune.main([plan, *out, "--page"]) == 0
    assert capsys.readouterr().out == f"{os.path.join(out[1], 'tune.html')}\n"
    winner = found.winners["fedavg"]
    text = (tmp_path / "arrays" / "tuned.toml").read_text()
    assert text == found.configs["fedavg"].read_text()
    assert f"lr = {winner.settings['lr']}\n" in text
    assert found.page.is_file()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parallel": 0}, "parallel: got 0, expected a number of runs, at least 1"),
        ({"parallel": "2"}, "parallel: got '2', expected a number of runs"),
        ({"launcher": "srun -n4"}, "launcher: got 'srun -n4', expected a list of its words"),
        ({"ranks": 0}, "-n: got '0', expected a number of ranks from 1 to 4096"),
    ],
)
def test_arguments_that_start_nothing(tmp_path, wrong, message):
    with pytest.raises(fedlada_mpi.UserError) as error:
        fedlada_mpi.tune({"search": {"lr": [0.1]}, "tune": {"rounds": 1}}, out=tmp_path / "found", **wrong)
    assert message in str(error.value)
    assert not (tmp_path / "found").exists()


def test_a_plan_with_numbers_of_numpy(tmp_path, monkeypatch):
    seen = []

    def refusing(*_, **__):
        return lambda runs: seen.extend(run.given for run in runs) or Ended(75, {})

    monkeypatch.setattr(running, "at_once", refusing)
    plan = {
        "base": {"algorithm": "fedavg", "local_epochs": np.int64(2)},
        "search": {"lr": np.array([0.25, 0.5]), "batch_size": (np.int32(5), np.int64(10))},
        "tune": {"strategy": "grid", "rounds": np.int64(1)},
    }
    with pytest.raises(KeyboardInterrupt):
        fedlada_mpi.tune(plan, out=tmp_path / "found", quiet=True)
    values = [(run["local_epochs"], run["lr"], run["batch_size"]) for run in seen]
    assert values == [(2, 0.25, 5), (2, 0.25, 10), (2, 0.5, 5), (2, 0.5, 10)]
    assert json.loads((tmp_path / "found" / "tune.json").read_text())["plan"]["search"]["batch_size"] == [5, 10]


def test_the_module_is_the_function():
    """Whichever way it is imported."""
    assert fedlada_mpi.tune is tune
    assert callable(fedlada_mpi.tune)
    with pytest.raises(fedlada_mpi.UserError, match="needs out=DIRECTORY"):
        fedlada_mpi.tune({"search": {}})
