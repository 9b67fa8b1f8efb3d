"""TensorBoard, W&B and MLflow: what arrives, in one run of theirs after a resume; and what happens when they fail."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from limits import LIMIT
from ranks import python
from repository import ROOT
from training_runs import arguments, make_data, run_here

from fedlada_mpi.run import main
from fedlada_mpi.rundir import sinks
from fedlada_mpi.settings import Config
from fedlada_mpi.support.disk import WriteError

SHORT = dict(algorithm="fedavg", local_steps=1, eval_every=1, checkpoint_every=2)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("sinks"), [4, 6], silos=1)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")


def wandb_history(folder) -> dict[int, dict]:
    """What an offline run has stored, by step: LevelDB's log format, in which each record is a Protocol Buffer."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    content, at, found, parts = path.read_bytes(), 7, {}, b""
    while at + 7 <= len(content):
        if (rest := 32768 - at % 32768) < 7:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts, at = parts + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if items:
                found[record.history.step.num] = items
            parts = b""
    return found


@pytest.mark.slow
def test_metrics_arrive_and_a_resumed_run_goes_on_in_the_same_one(data, tmp_path, offline):
    from mlflow.tracking import MlflowClient

    out = tmp_path / "run"
    hooks = sys.exit, sys.excepthook
    run_here(data, out, **SHORT, rounds=2, wandb=True, mlflow=True)
    ids = json.loads((out / sinks.IDS).read_text())
    client = MlflowClient()
    assert client.get_run(ids["mlflow"]).info.status == "FINISHED"
    whole = run_here(data, out, **SHORT, rounds=4, wandb=True, mlflow=True, resume=True)
    assert json.loads((out / sinks.IDS).read_text()) == ids
    assert (sys.exit, sys.excepthook) == hooks

    run = client.get_run(ids["mlflow"])
    (known,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    assert (known.info.run_id, run.info.run_name, run.info.status) == (ids["mlflow"], "run", "FINISHED")
    assert (run.data.params["algorithm"], run.data.params["lr"]) == ("fedavg", "0.1")
    for name in ("test_acc", "train_loss", "local_loss", "lr"):
        recorded = {metric.step: metric.value for metric in client.get_metric_history(ids["mlflow"], name)}
        assert recorded == {record["round"]: pytest.approx(record[name]) for record in whole.metrics}

    parts = sorted((out / "wandb").glob(f"offline-run-*-{ids['wandb']}"))
    assert len(parts) == 2
    history = {**wandb_history(parts[0]), **wandb_history(parts[1])}
    assert {t: items["test_loss"] for t, items in history.items()} == {
        record["round"]: pytest.approx(record["test_loss"]) for record in whole.metrics
    }


@pytest.mark.parametrize("active", [None, "another"])
def test_a_run_of_wandb_that_is_active_stays_as_it_is(active, tmp_path, monkeypatch):
    """A stand-in, as far as ``init`` gives the active run unless it is asked for a new one."""
    fake = ModuleType("wandb")
    fake.run, fake.Settings = active and SimpleNamespace(id=active), dict

    def init(reinit, **settings):
        return SimpleNamespace(id="new") if reinit == "create_new" or not fake.run else fake.run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert sinks.Wandb(tmp_path, {}, "").id == "new"


def test_tensorboard_where_it_is_installed(data, tmp_path, monkeypatch):
    """A stand-in for its writer: with the real one, every run of the suite would import it."""
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((Path(folder).name, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    run_here(data, tmp_path, **SHORT, rounds=1)
    calls.clear()
    run = run_here(data, tmp_path, **{**SHORT, "eval_train_every": 0}, rounds=3, resume=True)
    assert (calls[0], calls[-1]) == (("tensorboard", 2), "closed")
    names = ("local_loss", "consistency", "lr", "train_loss", "train_acc", "test_loss", "test_acc")
    recorded = [(n, r[n], r["round"]) for r in run.metrics[1:] for n in names if r[n] is not None]
    assert calls[1:-1] == recorded
    assert ("test_acc", run.metrics[1]["test_acc"], 2) in recorded
    assert not [call for call in recorded if call[0] == "train_acc" and call[2] == 2]


@pytest.mark.slow
def test_a_new_run_in_the_same_place_is_another_one_there(data, tmp_path, offline):
    run_here(data, tmp_path / "run", **SHORT, rounds=1, mlflow=True)
    before = json.loads((tmp_path / "run" / sinks.IDS).read_text())
    run_here(data, tmp_path / "run", **SHORT, rounds=1, mlflow=True, overwrite=True)
    assert json.loads((tmp_path / "run" / sinks.IDS).read_text()).keys() == before.keys()
    assert json.loads((tmp_path / "run" / sinks.IDS).read_text()) != before
    run_here(data, tmp_path / "run", **SHORT, rounds=1, overwrite=True)
    assert not (tmp_path / "run" / sinks.IDS).exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line_before_anything_is_written(name, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    assert main([*arguments(data, tmp_path / "run", {**SHORT, "rounds": 1}), f"--{name}"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: --{name}: cannot import {name} (")
    assert message.endswith(f"): pip install 'fedlada_mpi[{name}]', or leave --{name} out\n")
    assert not (tmp_path / "run").exists()


def test_nothing_is_imported_that_is_not_asked_for(data, tmp_path):
    code = "import sys; from fedlada_mpi.run import main; main(sys.argv[1:])"
    code += "; assert not {'wandb', 'mlflow'} & {*sys.modules}"
    words = arguments(data, tmp_path / "run", {**SHORT, "rounds": 1})
    subprocess.run([python(), "-c", code, *words], cwd=ROOT, check=True, capture_output=True, timeout=LIMIT)


def test_a_service_that_cannot_start(data, tmp_path, offline, monkeypatch, capsys):
    """A new run is refused; one that goes on, goes on without."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://somewhere")
    out, words = tmp_path / "run", {**SHORT, "rounds": 1}
    assert main([*arguments(data, out, words), "--mlflow"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --mlflow: cannot start (")
    assert message.count("\n") == 1
    run_here(data, out, **words)
    capsys.readouterr()
    resumed = run_here(data, out, **{**SHORT, "rounds": 3}, mlflow=True, resume=True)
    assert len(resumed.metrics) == 3
    assert "note: mlflow failed after round 1 (" in capsys.readouterr().out


class Failing:
    """A service that fails at its second round."""

    id = "7"

    def __init__(self, *_):
        self.calls = []

    def add(self, number, values):
        self.calls.append(number)
        if number == 2:
            raise ConnectionError("no route\nto host")

    def flush(self):
        pass

    def close(self, status):
        self.calls.append(status)


def test_a_service_that_fails_during_the_run_is_noted_once(data, tmp_path, monkeypatch, capsys):
    services = []
    monkeypatch.setitem(sinks._SERVICES, "wandb", lambda *a: services.append(Failing()) or services[-1])
    run = run_here(data, tmp_path / "run", **SHORT, rounds=4, wandb=True)
    assert run.summary["status"] == "finished"
    assert services[0].calls == [1, 2]
    note = "note: wandb failed after round 2 (no route): going on without it\n"
    assert capsys.readouterr().out.count(note) == 1
    assert json.loads((tmp_path / "run" / sinks.IDS).read_text()) == {"wandb": "7"}


def test_how_it_ended(tmp_path, monkeypatch):
    class Full(Failing):
        def add(self, number, values):
            raise WriteError("the disk is full")

    made = []
    for cls, outcome in ((Failing, "finished"), (Full, "failed")):
        monkeypatch.setitem(sinks._SERVICES, "mlflow", lambda *a, cls=cls: made.append(cls()) or made[-1])
        try:
            with sinks.Sinks(Config(out=str(tmp_path), mlflow=True), 0) as opened:
                opened.add(1, {})
                opened.status = "finished"
        except WriteError:
            assert outcome == "failed"
        assert made[-1].calls[-1] == outcome


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"wandb": 3}', b"\xff"])
def test_names_that_cannot_be_read_are_new_ones(content, tmp_path):
    (tmp_path / sinks.IDS).write_bytes(content)
    assert sinks._read_ids(tmp_path) == {}
