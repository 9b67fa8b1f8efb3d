"""The best round by the validation set: which one, its model, and that it survives kills and resumes to the bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ranks import barrier, is_root
from training_runs import Run

from fedlada_mpi import models
from fedlada_mpi.data.manifest import VALIDATION_FILE, read_manifest
from fedlada_mpi.data.shards import read_test
from fedlada_mpi.run import main
from fedlada_mpi.rundir import checkpoint
from fedlada_mpi.rundir.best import Best

# Of these six rounds, the second and then the fourth are the best so far.
SETTINGS = dict(
    algorithm="fedavg", rounds=6, local_steps=2, lr=0.3, seed=3, eval_every=1, validation=0.1, checkpoint_every=2,
    device="cpu",
)  # fmt: skip


@pytest.fixture(scope="session")
def run(shared_tmp):
    """A run on the digits, of which the run itself holds out a tenth."""

    def start(out, *words: str, **settings) -> Run:
        values = {**SETTINGS, "data_dir": shared_tmp / "best-data", "out": out, **settings}
        flags = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        assert main([*flags, *words]) == 0
        barrier()
        return Run(out, None)

    return start


@pytest.fixture(scope="session")
def whole(run, shared_tmp):
    return run(shared_tmp / "best-whole")


def load(path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


def same_model(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.ranks
def test_the_best_round_and_its_model(run, whole, out, shared_tmp):
    chosen = max(whole.metrics, key=lambda record: record["val_acc"])
    assert whole.summary["best_validation"] == {n: chosen[n] for n in ("round", "val_acc", "val_loss", "test_acc")}
    assert chosen["round"] < SETTINGS["rounds"], "or the test shows nothing"
    best = load(whole.out / "best.pt")
    assert same_model(best, run(out, rounds=chosen["round"], eval_every=0).model)
    assert not same_model(best, whole.model)

    manifest = read_manifest(shared_tmp / "best-data" / "digits-50clients-dirichlet0.3-validation0.1")
    images, labels = read_test(manifest, name=VALIDATION_FILE)
    module = models.build("cnn", manifest.classes, manifest.image_shape).module
    module.load_state_dict(best)
    pixels = (torch.from_numpy(images) / 255 - torch.tensor(manifest.mean)) / torch.tensor(manifest.std)
    with torch.no_grad():
        logits = module(pixels.permute(0, 3, 1, 2))
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
    assert (logits.argmax(1).numpy() == labels).mean() == pytest.approx(chosen["val_acc"])
    assert float(loss) == pytest.approx(chosen["val_loss"], rel=1e-4)


@pytest.mark.ranks
def test_validation_as_often_as_the_test(run, out):
    metrics = run(out, eval_every=4, eval_train_every=3).metrics
    assert [r["round"] for r in metrics if r["val_acc"] is not None] == [4, 6]
    assert [r["round"] for r in metrics if r["test_acc"] is not None] == [4, 6]
    assert [r["round"] for r in metrics if r["train_acc"] is not None] == [3, 6]


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "tested"), [("end", [6]), ("never", [])])
def test_the_test_set_is_left_alone(run, whole, out, capsys, how, tested):
    """Training, validation and the choice of the best round are those of the run that looks at it."""
    capsys.readouterr()
    apart = run(out, eval_test=how)
    assert [r["round"] for r in apart.metrics if r["test_acc"] is not None] == tested
    assert [r["val_acc"] for r in apart.metrics] == [r["val_acc"] for r in whole.metrics]
    assert same_model(apart.model, whole.model)
    expected, chosen = whole.summary["best_validation"], apart.summary["best_validation"]
    assert chosen == {**expected, "test_acc": None}
    final = apart.summary["final"]
    assert final == (whole.summary["final"] if tested else None)
    if is_root():
        assert f"  validation     {chosen['val_acc']:.2%} best (round {chosen['round']})" in capsys.readouterr().out


@pytest.mark.ranks
def test_a_resumed_run_has_the_best_of_the_whole(run, whole, out):
    """Whatever a kill left in best.pt; also where the best round was before the checkpoint."""
    for rounds in (1, 3, 5):
        run(out / str(rounds), rounds=rounds)
        if is_root():
            (out / str(rounds) / "best.pt").write_bytes(b"of a round that is repeated")
        barrier()
        resumed = run(out / str(rounds), "--resume")
        assert (out / str(rounds) / "best.pt").read_bytes() == (whole.out / "best.pt").read_bytes()
        assert resumed.summary["best_validation"] == whole.summary["best_validation"]


@pytest.mark.ranks
def test_extended_in_rounds_that_are_not_evaluated(run, whole, out):
    """The best is then one of the rounds up to the checkpoint, and best.pt is its model."""
    first = run(out, rounds=2)
    if is_root():
        (out / "best.pt").unlink()
    barrier()
    last = run(out, "--resume", rounds=3, eval_every=0)
    known = [record for record in last.metrics if record["val_acc"] is not None]
    assert [record["round"] for record in known] == [1, 2, 3]
    assert last.summary["best_validation"]["round"] == max(known, key=lambda record: record["val_acc"])["round"]
    assert first.summary["best_validation"]["round"] <= 2


def test_first_of_equals_and_nothing_known_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "read_more", lambda *_: None)
    (tmp_path / "best.pt").write_bytes(b"of a round that is repeated")
    best = Best(tmp_path, 3, torch.zeros(2), lambda x: {"x": x})
    assert not (tmp_path / "best.pt").exists()
    assert best.kept() == {}
    seen = [(4, None), (5, 0.5), (6, 0.7), (7, 0.7), (8, 0.6)]
    for number, accuracy in seen:
        record = {"round": number, "val_acc": accuracy, "val_loss": 1.0, "test_acc": 0.25, "lr": 3}
        best.add(record, torch.full((2,), float(number)))
    best.write()
    assert best.record == {"round": 6, "val_acc": 0.7, "val_loss": 1.0, "test_acc": 0.25}
    assert load(tmp_path / "best.pt")["x"].tolist() == [6.0, 6.0]


def test_shards_without_a_validation_set(run, out, shared_tmp):
    plain = run(out, data_dir=shared_tmp / "best-data-plain", validation=0, rounds=1)
    assert not (out / "best.pt").exists()
    assert "best_validation" not in plain.summary
    assert "val_acc" not in plain.metrics[0]
    again = run(out, "--overwrite", rounds=1)
    assert (out / "best.pt").exists()
    assert json.loads((out / "config.json").read_text())["validation"] == 0.1
    assert np.isfinite(again.metrics[0]["val_loss"])
    run(out, "--overwrite", data_dir=shared_tmp / "best-data-plain", validation=0, rounds=1)
    assert not (out / "best.pt").exists()
