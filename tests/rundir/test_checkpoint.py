"""Checkpoints: whole or not there, two of them, and damage is named with what to do."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from ranks import barrier, is_root
from training_runs import arguments, make_data, run_here

from fedlada_mpi.algorithms import Vectors
from fedlada_mpi.mpi import World
from fedlada_mpi.run import main
from fedlada_mpi.rundir import checkpoint, files
from fedlada_mpi.settings import Config
from fedlada_mpi.support.errors import UserError

SETTINGS = dict(
    algorithm="scaffold", local_epochs=1, batch_size=2, participation=0.5, rounds=5, checkpoint_every=1, seed=4
)


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "checkpoint", [4, 3, 5, 2], silos=2)


@pytest.fixture
def world():
    ranks = World()
    yield ranks
    ranks.close()


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoint").iterdir())


def state(offset: float) -> tuple[Vectors, dict[str, dict[int, torch.Tensor]]]:
    s = Vectors(x=torch.arange(5.0) + offset, c=torch.full((5,), offset))
    return s, {"c_i": {3: torch.full((5,), 3 + offset), 11: torch.full((5,), 11 + offset)}}


@pytest.mark.ranks
def test_only_two_are_kept(data, out):
    run_here(data, out, **SETTINGS)
    assert names(out) == ["round_000004", "round_000005"]


def test_the_newest_has_the_largest_number(tmp_path):
    """Also past a million rounds, where the names have more digits."""
    for t in (1_000_000, 999_950, 50):
        checkpoint.folder(tmp_path, t).mkdir(parents=True)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["round_000050", "round_999950", "round_1000000"]
    assert [files.checkpoint_round(path) for path in checkpoint.complete(tmp_path)] == [50, 999950, 1000000]


@pytest.mark.ranks
@pytest.mark.parametrize(("every", "rounds"), [(0, [5]), (2, [4, 5]), (5, [5])])
def test_when_they_are_written(every, rounds, data, out):
    run_here(data, out, **{**SETTINGS, "checkpoint_every": every})
    assert names(out) == [f"round_{t:06d}" for t in rounds]


def test_what_was_saved_is_loaded(world, tmp_path):
    s, clients = state(0.5)
    save_checkpoint(world, tmp_path, 7, Config(), s, clients)
    with h5py.File(tmp_path / "checkpoint" / "round_000007" / "server.h5") as file:
        assert set(file) == {"x", "c"}
        assert file["x"][:].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert file.attrs["round"] == 7
        assert json.loads(file.attrs["config"])["algorithm"] == "fedlada"
    assert checkpoint.latest(tmp_path, Config()) == 7
    fresh, own = Vectors(x=torch.zeros(5), c=torch.zeros(5)), {"c_i": {}}
    checkpoint.load(tmp_path, 7, fresh, own, {11, 12}, world)
    assert torch.equal(fresh.x, s.x)
    assert torch.equal(fresh.c, s.c)
    assert list(own["c_i"]) == [11], "only the clients that this rank has now"
    assert torch.equal(own["c_i"][11], clients["c_i"][11])


def test_clients_are_found_whichever_rank_wrote_them(world, tmp_path):
    s, clients = state(0.0)
    save_checkpoint(world, tmp_path, 1, Config(), s, clients)
    folder = tmp_path / "checkpoint" / "round_000001"
    with h5py.File(folder / "clients_0009.h5", "w") as file:
        file["4/c_i"] = np.full(5, 44.0, np.float32)
    (folder / checkpoint.LIST).write_text(json.dumps(["clients_0000.h5", "clients_0009.h5", "server.h5"]))
    own = {"c_i": {}}
    checkpoint.load(tmp_path, 1, s, own, {3, 4}, world)
    assert {client: float(row[0]) for client, row in own["c_i"].items()} == {3: 3.0, 4: 44.0}


def test_a_lost_file_is_missed(world, tmp_path):
    s, clients = state(0.0)
    save_checkpoint(world, tmp_path, 1, Config(), s, clients)
    (tmp_path / "checkpoint" / "round_000001" / "clients_0000.h5").unlink()
    with pytest.raises(UserError, match=r"clients_0000.h5 is damaged .* --resume from the checkpoint before it"):
        checkpoint.load(tmp_path, 1, s, {"c_i": {}}, {3}, world)


def test_one_that_was_not_finished_is_ignored_and_replaced(world, tmp_path):
    s, clients = state(1.0)
    save_checkpoint(world, tmp_path, 1, Config(), s, clients)
    half = tmp_path / "checkpoint" / "round_000002.tmp"
    half.mkdir()
    (half / "server.h5").write_bytes(b"half of it")
    (half / "clients_0099.h5").write_bytes(b"of another rank")
    assert checkpoint.latest(tmp_path, Config()) == 1
    save_checkpoint(world, tmp_path, 2, Config(), s, clients)
    assert names(tmp_path) == ["round_000001", "round_000002"]
    assert sorted(p.name for p in (tmp_path / "checkpoint" / "round_000002").iterdir()) == [
        "clients_0000.h5",
        checkpoint.LIST,
        "server.h5",
    ]


def test_a_failed_write_leaves_the_one_before(world, tmp_path, monkeypatch):
    s, clients = state(1.0)
    save_checkpoint(world, tmp_path, 1, Config(), s, clients)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = (
            r"cannot write .*round_000002.tmp/server.h5: No space left on device "
            r"\(needs 0.0 MB, [0-9.]+ MB free\): make room, then add --resume"
        )
        with pytest.raises(UserError, match=message):
            save_checkpoint(world, tmp_path, 2, Config(), s, clients)
    assert names(tmp_path) == ["round_000001"]
    assert checkpoint.latest(tmp_path, Config()) == 1
    checkpoint.load(tmp_path, 1, s, clients, {3}, world)


def test_a_failed_removal_leaves_no_half_checkpoint(world, tmp_path, monkeypatch):
    s, clients = state(1.0)
    for t in (1, 2):
        save_checkpoint(world, tmp_path, t, Config(), s, clients)

    def fail(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        with pytest.raises(UserError, match=r"Input/output error: check the disk, then add --resume"):
            save_checkpoint(world, tmp_path, 3, Config(), s, clients)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["round_000002", "round_000003"]
    checkpoint.remove_unfinished(tmp_path)
    assert names(tmp_path) == ["round_000002", "round_000003"]


def overwrite_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        datasets = []
        file.visititems(lambda _, item: datasets.append(item) if isinstance(item, h5py.Dataset) else None)
        at = datasets[0].id.get_offset()
    content[at] ^= 0xFF
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("server.h5", overwrite_middle),
        ("server.h5", cut),
        ("server.h5", Path.unlink),
        ("clients_0000.h5", overwrite_middle),
        ("clients_0000.h5", cut),
    ],
)
def test_damage_is_named_with_what_to_do(name, damage, data, out, capsys):
    whole = run_here(data, out / "whole", **SETTINGS)
    shutil.copytree(out / "whole", out / "damaged")
    (out / "damaged" / "model.pt").unlink()
    for record in ("round_000005", "round_000004"):
        path = out / "damaged" / "checkpoint" / record / name
        damage(path)
        capsys.readouterr()
        words = [*arguments(data, out / "damaged", SETTINGS), "--resume"]
        assert main(words) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {path} is damaged (")
        assert message.endswith(f"): remove {path.parent} and --resume from the checkpoint before it\n")
        shutil.rmtree(path.parent)
        if record == "round_000005":
            # Following the message gives the run that was never damaged.
            shutil.copytree(out / "damaged", out / "repaired")
            again = run_here(data, out / "repaired", resume=True, **SETTINGS)
            assert all(torch.equal(again.model[n], whole.model[n]) for n in data.names)
            assert [r["round"] for r in again.metrics] == [1, 2, 3, 4, 5]


@pytest.mark.ranks
def test_resume_without_a_checkpoint_starts_from_the_beginning(data, out):
    run = run_here(data, out, resume=True, **SETTINGS)
    assert [record["round"] for record in run.metrics] == [1, 2, 3, 4, 5]


@pytest.mark.ranks
def test_fewer_rounds_than_done(data, out, capsys):
    run_here(data, out, **SETTINGS)
    for name in ("model.pt", "summary.json"):  # whether its results are there or not
        assert main([*arguments(data, out, {**SETTINGS, "rounds": 3}), "--resume"]) == 2
        if is_root():
            expected = f"error: --resume: {out} is at round 5, past --rounds 3: ask for more rounds\n"
            assert capsys.readouterr().err == expected
            (out / name).unlink()
        barrier()


@pytest.mark.ranks
def test_no_rounds(data, out):
    settings = {**SETTINGS, "rounds": 0}
    first = run_here(data, out, **settings)
    again = run_here(data, out, resume=True, **settings)
    assert again.summary == first.summary
    longer = run_here(data, out, resume=True, **SETTINGS)
    assert [record["round"] for record in longer.metrics] == [1, 2, 3, 4, 5]
