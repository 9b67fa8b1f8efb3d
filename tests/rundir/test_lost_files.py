"""Files and directories that disappear or change while a run writes to them, or before it goes on."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from tiers import slow
from training_runs import Run, make_data, same

import fedlada_mpi
from fedlada_mpi.rundir import checkpoint, lock
from fedlada_mpi.rundir.metrics import DAMAGED
from fedlada_mpi.support.errors import UserError

FILES = {"config.json", "metrics.jsonl", "summary.json", "model.pt", "clients.h5", "checkpoint"}
SETTINGS = dict(
    algorithm="scaffold", model="cnn", rounds=6, checkpoint_every=2, local_steps=1, participation=0.5, seed=2,
    eval_every=1, eval_clients=1, device="cpu", targets=[0.01],
)  # fmt: skip


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("lost"), [4, 6, 5])


def train(data, out, accident=None, at=3, **settings) -> Run:
    """``accident`` happens to the directory after round ``at``."""

    def on_round(record):
        if record["round"] == at and accident is not None:
            accident(out)

    settings = {**SETTINGS, "partition": "natural", "clients": 3, "dataset": str(data.shards), **settings}
    fedlada_mpi.train(out=str(out), on_round=on_round, quiet=True, **settings)
    return Run(out, data)


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    return train(data, tmp_path_factory.mktemp("whole") / "run")


def moved(out):
    out.rename(out.with_name("elsewhere"))


def replaced(out):
    moved(out)
    out.mkdir()
    (out / "notes.txt").write_text("mine")


def removed(path):
    """Also where a checkpoint is being written into it."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def emptied(out):
    removed(out)
    out.mkdir()


def truncated(out):
    os.truncate(out / "metrics.jsonl", 100)


def edited(out):
    path = out / "metrics.jsonl"
    path.with_suffix(".new").write_text(path.read_text().replace("lr", "rl"))
    path.with_suffix(".new").replace(path)


def without(name):
    def remove(out):
        removed(out / name) if (out / name).is_dir() else (out / name).unlink()

    return remove


ALL = "config.json, metrics.jsonl"
LOST = {
    "moved": (moved, ALL),
    "removed": (removed, ALL),
    "emptied": (emptied, ALL),
    "replaced": (replaced, ALL),
    "truncated": (truncated, "metrics.jsonl"),
    "edited": (edited, "metrics.jsonl"),
    **{name: (without(name), name) for name in ("metrics.jsonl", "config.json")},
    "clients.h5": (without("clients.h5"), ""),  # has new rounds in any case
    "checkpoint": (without("checkpoint"), ""),  # the next one is complete
}


@pytest.mark.parametrize("at", [3, slow(6)])
@pytest.mark.parametrize("accident", [name if name in ("moved", "edited") else slow(name) for name in LOST])
def test_what_is_lost_during_a_run_is_written_again(accident, at, data, whole, tmp_path, capsys):
    out = tmp_path / "run"
    happens, named = LOST[accident]
    run = train(data, out, happens, at)
    same(run, whole)
    assert {path.name for path in out.iterdir()} >= FILES
    assert (out / "clients.h5").read_bytes() == (whole.out / "clients.h5").read_bytes()
    assert json.loads((out / "config.json").read_text())["out"] == str(out)
    printed = capsys.readouterr().out
    assert printed.count("during the run: written again") == bool(named)
    assert (f"note: {named}" in printed) == bool(named)
    assert not lock.owner(out)
    longer = train(data, out, rounds=8, resume=True)
    assert [record["round"] for record in longer.metrics] == [*range(1, 9)]


def test_tensorboards_files_are_written_again(data, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    train(data, out, without("tensorboard"))
    assert any((out / "tensorboard").iterdir())
    assert "note: tensorboard of" in capsys.readouterr().out


def test_a_directory_that_became_a_link_is_followed_without_a_note(data, whole, tmp_path, capsys):
    def linked(out):
        out.rename(tmp_path / "elsewhere")
        out.symlink_to(tmp_path / "elsewhere")

    same(train(data, tmp_path / "run", linked), whole)
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("at", [3, 6])
def test_a_file_in_place_of_the_directory_is_one_line(at, data, tmp_path):
    def file(out):
        moved(out)
        out.write_text("a file")

    with pytest.raises(UserError, match=r"^cannot write .*run.*: (File exists|Not a directory): "):
        train(data, tmp_path / "run", file, at)
    assert (tmp_path / "run").read_text() == "a file"


def test_a_directory_that_another_run_has_taken_is_left_to_it(data, tmp_path):
    def taken(out):
        moved(out)
        out.mkdir()
        (out / lock.NAME).write_text(json.dumps({**lock._me(), "pid": os.getppid(), "started": ""}))

    with pytest.raises(UserError, match=r"run.lock was taken over by process"):
        train(data, tmp_path / "run", taken)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [lock.NAME]


def test_a_file_of_a_checkpoint_that_disappears_while_it_is_written_is_one_line(data, tmp_path, monkeypatch):
    checksum = checkpoint._checksum

    def gone(path):
        path.unlink()
        return checksum(path)

    monkeypatch.setattr(checkpoint, "_checksum", gone)
    with pytest.raises(UserError, match=r"server.h5: No such file or directory: put its directory back, then add"):
        train(data, tmp_path / "run")


def without_line(number):
    return lambda lines: [line for i, line in enumerate(lines) if i != number]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda lines: lines, ""),
        (lambda lines: [*lines, b'{"round": 7, "cut'], ""),
        (without_line(2), "written again from the checkpoint, and kept as"),
        (lambda lines: lines[:-2], "written again from the checkpoint, and kept as"),
        (lambda lines: lines[::-1], "written again from the checkpoint, and kept as"),
        (lambda lines: [*lines[:3], lines[1], *lines[3:]], "written again from the checkpoint, and kept as"),
        (lambda lines: [*lines[:3], b"garbage", *lines[4:]], "written again from the checkpoint, and kept as"),
        (lambda lines: [lines[0].replace(b'"bytes_up": ', b'"bytes_up": 9'), *lines[1:]], "written again"),
        (None, "written again from the checkpoint"),
    ],
    ids=["same", "cut", "gap", "short", "reordered", "doubled", "garbage", "edited", "removed"],
)
def test_a_resumed_run_has_all_its_records(change, note, data, whole, tmp_path, capfd):
    out = tmp_path / "run"
    shutil.copytree(whole.out, out)
    path = out / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    if change is None:
        path.unlink()
    else:
        path.write_bytes(b"\n".join(change(lines)) + b"\n" * (change(lines)[-1][-1:] == b"}"))
    before = path.read_bytes() if path.exists() else b""
    settings = {**SETTINGS, "partition": "natural", "clients": 3, "dataset": str(data.shards), "rounds": 8}
    fedlada_mpi.train(out=str(out), resume=True, **settings)
    run, printed = Run(out, data), capfd.readouterr().out
    assert [record["round"] for record in run.metrics] == [*range(1, 9)]
    assert run.metrics[:6] == whole.metrics
    assert run.summary["bytes_up"] == sum(record["bytes_up"] for record in run.metrics)
    assert ("note: metrics.jsonl" in printed) == bool(note)
    assert note in printed
    assert (out / DAMAGED).exists() == (bool(note) and change is not None)
    if (out / DAMAGED).exists():
        assert (out / DAMAGED).read_bytes() == before
