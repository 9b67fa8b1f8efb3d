"""Shards, checkpoints and records that version 0.1.0 wrote.

``version_0_1.tar.xz`` has shards of four clients, two runs over three rounds of a linear model on them, and the models
that 0.1.0 itself had after five.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlada_mpi import load, models
from fedlada_mpi.algorithms import built_in_hypers
from fedlada_mpi.analysis.load import read_all
from fedlada_mpi.run import main
from fedlada_mpi.settings import SETTINGS, own_settings
from fedlada_mpi.support.inputs import read_json


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    with tarfile.open(Path(__file__).with_name("version_0_1.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("tiny_model", None)


@pytest.mark.parametrize("method", ["fedlada", "scaffold"])
def test_a_resumed_run_ends_as_in_0_1(method, written):
    """FedLADA's has FedAdam's eps in its record; SCAFFOLD has state of its clients."""
    assert main(["--resume", method, "--rounds", "5", "--trust", "--engine", "generic"]) == 0
    ours, theirs = (torch.load(path, weights_only=True) for path in (f"{method}/model.pt", f"{method}-5.pt"))
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


def test_another_order_of_parameters_is_refused(written, capsys):
    """0.1.0 had users' models on the generic engine only."""
    assert main(["--resume", "fedlada", "--rounds", "5", "--trust"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: --resume: fedlada has the model's parameters in another order: use --engine generic, or another --out"
    )


def test_shards_are_trained_on(written):
    assert (
        main(["--dataset", "shards", "--algorithm", "fedavg", "--model", "linear", "--rounds", "1", "--out", "new"])
        == 0
    )
    assert read_json(written / "new/summary.json")["rounds"] == 1


def test_a_run_is_loaded_and_evaluated(written):
    run = load(written / "fedlada", trust=True)
    expected = read_json(written / "fedlada/summary.json")["final"]
    assert run.evaluate()["accuracy"] == pytest.approx(expected["test_acc"])
    assert run.predict(np.zeros((1, 4, 4, 1), np.uint8)) == [0]


def test_records_have_the_settings_that_the_method_read(written):
    record = read_json(written / "fedlada/config.json")
    assert (record["eps"], record["mu"]) == (0.01, 0.1), "of FedAdam and FedProx"
    own = own_settings(record)
    assert record.keys() - own.keys() == {"eps", "mu"}
    assert own_settings({**record, "model": "lenet"})["model"] == "lenet3"
    later = {**record, "task": "classification"}
    assert own_settings(later) == later


def test_no_setting_has_another_name(written):
    record = read_json(written / "fedlada/config.json")
    assert record.keys() <= SETTINGS.keys() | built_in_hypers().keys()


def test_the_report_reads_records(written):
    runs, problems = read_all([written / "fedlada", written / "scaffold"])
    assert problems == []
    assert [(run.settings["algorithm"], len(run.rounds)) for run in runs] == [("fedlada", 3), ("scaffold", 3)]
    assert runs[0].settings["eps"] == 0.0


def test_the_order_of_parameters_is_that_of_0_1():
    """Checkpoints have vectors of parameters in this order."""
    cnn = models.build("cnn", (10,), (8, 8, 1)).layout
    assert [(e.name, e.stored, e.offset, e.kernel) for e in cnn.entries] == [
        ("conv1.weight", (16, 16), 0, (16, 1, 3, 3)),
        ("conv1.bias", (16,), 256, None),
        ("conv2.weight", (144, 32), 320, (32, 16, 3, 3)),
        ("conv2.bias", (32,), 4928, None),
        ("fc.weight", (512, 10), 4992, (10, 32, 4, 4)),
        ("fc.bias", (10,), 10112, None),
    ]


def test_the_other_engine_is_refused_for_models_of_users_own(written, capsys):
    """A checkpoint of today says in which order its parameters are."""
    started = ["--dataset", "shards", "--algorithm", "fedavg", "--model", "tiny_model:linear", "--out", "new"]
    assert main([*started, "--rounds", "1"]) == 0
    assert main(["--resume", "new", "--rounds", "2", "--engine", "generic"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: --resume: new has the model's parameters in another order: use --engine auto and the torch that it was "
        "started with, or another --out"
    )
    assert main(["--resume", "new", "--rounds", "2"]) == 0
