"""Checkpoints that a thread writes: as of the moment they were begun, complete or not there, on all ranks alike."""

from __future__ import annotations

import shutil
import threading
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from ranks import barrier, is_root
from training_runs import make_data

import fedlada_mpi
from fedlada_mpi.analysis import load
from fedlada_mpi.mpi import World
from fedlada_mpi.rounds.clients import ClientState
from fedlada_mpi.rundir import checkpoint, results
from fedlada_mpi.rundir.checkpoint_writer import CheckpointWriter
from fedlada_mpi.settings import Config
from fedlada_mpi.support.disk import WriteError
from fedlada_mpi.support.errors import DivergedError, UserError


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "writer", [4, 3, 5, 2], silos=2)


@pytest.fixture
def writer():
    with World() as world:
        writer = CheckpointWriter(world)
        yield writer
        writer.close()


@pytest.fixture
def held(monkeypatch):
    """Files are written once this is set."""
    go, write = threading.Event(), checkpoint.write_vectors

    def later(*arguments):
        assert go.wait(30)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write_vectors", later)
    yield go
    go.set()


def names(out) -> list[str]:
    return sorted(path.name for path in (out / "checkpoint").glob("*"))


def draft(writer, out, t, x, state=None) -> checkpoint.Draft:
    server = writer.copies({"x": x}) if is_root() else {}
    return checkpoint.Draft(out, t, writer.world.rank, Config(), server, state or {})


def test_it_has_the_values_at_its_beginning(writer, held, tmp_path):
    x, kept = torch.arange(3.0), ClientState(["c_i"])
    rows = torch.tensor([[1.0, 1, 1], [2, 2, 2]])
    kept.store(SimpleNamespace(c_i=rows), [4, 5], np.array([True, True]))
    writer.begin(draft(writer, tmp_path, 7, x, kept.frozen()), shared=False)
    x += 10
    kept.store(SimpleNamespace(c_i=10 * rows), [4, 6], np.array([True, True]))
    assert writer.is_writing
    assert names(tmp_path) == ["round_000007.tmp"]
    held.set()
    assert writer.settle()
    assert not writer.is_writing
    folder = tmp_path / "checkpoint" / "round_000007"
    with h5py.File(folder / "server.h5") as server, h5py.File(folder / "clients_0000.h5") as clients:
        assert server["x"][:].tolist() == [0, 1, 2]
        assert {client: float(clients[client]["c_i"][0]) for client in clients} == {"4": 1, "5": 2}
    assert {client: float(row[0]) for client, row in kept.vectors["c_i"].items()} == {4: 10, 5: 2, 6: 20}
    before = kept.vectors["c_i"][5]
    kept.store(SimpleNamespace(c_i=rows[:1]), [5], np.array([True]))
    assert kept.vectors["c_i"][5] is before, "no longer held, so it is written to again"
    assert before.tolist() == [1, 1, 1]


def test_copies_use_the_same_memory_again(writer):
    x, records = torch.arange(3.0), torch.zeros(2, dtype=torch.uint8)
    first = writer.copies({"x": x, "records": records})
    again = writer.copies({"x": 2 * x, "records": torch.ones(5, dtype=torch.uint8)})
    assert again["x"] is first["x"]
    assert again["x"].tolist() == [0, 2, 4]
    assert again["records"].tolist() == [1] * 5


def test_one_that_fails_leaves_the_one_before(writer, tmp_path, monkeypatch):
    writer.begin(draft(writer, tmp_path, 1, torch.zeros(2)), shared=False)
    assert writer.settle()

    def full(path, *_):
        raise WriteError(f"cannot write {path}: no room")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_vectors", full)
        writer.begin(draft(writer, tmp_path, 2, torch.ones(2)), shared=False)
        assert not writer.settle()
    assert names(tmp_path) == ["round_000001"]
    assert writer.settle(), "there is nothing left to settle"


def test_closing_completes_what_is_the_roots_alone(writer, held, tmp_path):
    writer.begin(draft(writer, tmp_path, 1, torch.zeros(2)), shared=False)
    threading.Timer(0.05, held.set).start()
    writer.close()
    assert names(tmp_path) == ["round_000001"]


def test_closing_gives_up_what_other_ranks_have_a_part_in(writer, tmp_path):
    writer.begin(draft(writer, tmp_path, 1, torch.zeros(2)), shared=True)
    writer.close()
    assert names(tmp_path) == []


@pytest.mark.ranks
@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_learn_whether_it_is_complete(fails, writer, shared_tmp, monkeypatch):
    world, write = writer.world, checkpoint.write_vectors
    out = shared_tmp / f"ranks-{world.size}-{fails}"

    def last_rank_fails(path, *more):
        if fails and world.rank == world.size - 1:
            raise WriteError(f"cannot write {path}: no room")
        return write(path, *more)

    monkeypatch.setattr(checkpoint, "write_vectors", last_rank_fails)
    state = {"c_i": {world.rank: torch.full((2,), float(world.rank))}}
    writer.begin(draft(writer, out, 3, torch.zeros(2), state), shared=world.size > 1)
    assert writer.settle() is not fails
    barrier()
    assert names(out) == ([] if fails else ["round_000003"])
    if not fails:
        found = {path.name for path in (out / "checkpoint" / "round_000003").iterdir()}
        assert found == {"server.h5", checkpoint.LIST, *(f"clients_{rank:04d}.h5" for rank in range(world.size))}
    barrier()


SETTINGS = dict(algorithm="scaffold", rounds=6, checkpoint_every=2, local_steps=1, participation=0.5, device="cpu")


def train(data, out, on_round=None, **settings):
    settings = {**SETTINGS, "dataset": str(data.shards), "partition": "natural", "clients": 4, **settings}
    return fedlada_mpi.train(out=str(out), on_round=on_round, quiet=True, **settings)


def test_a_run_that_ends_by_an_error_has_the_checkpoint_that_was_begun(data, held, tmp_path):
    def stops(record):
        if record["round"] == 3:
            threading.Timer(0.05, held.set).start()
            raise RuntimeError("of a user")

    with pytest.raises(RuntimeError, match="of a user"):
        train(data, tmp_path / "run", stops)
    assert names(tmp_path / "run") == ["round_000002"]


def test_a_run_that_diverges_names_the_checkpoint_that_was_begun(data, tmp_path, monkeypatch):
    monkeypatch.setattr("fedlada_mpi.rounds.server.is_finite", lambda value: len(names(tmp_path / "run")) == 0)
    with pytest.raises(DivergedError, match=r"round 3: .*the last checkpoint is .*round_000002"):
        train(data, tmp_path / "run")
    assert results.diverged_after(tmp_path / "run") == 2
    assert load.read(tmp_path / "run").status == "diverged"
    monkeypatch.undo()
    train(data, tmp_path / "run", resume=True)
    assert results.diverged_after(tmp_path / "run") is None


def test_a_failure_in_the_thread_is_made_up_for_after_the_next_round(data, tmp_path, monkeypatch):
    """Or is the error of a checkpoint that is not written by a thread."""
    write, failing = checkpoint.write_vectors, {"thread"}

    def full(path, *more):
        by = "thread" if threading.current_thread().name.startswith("checkpoint") else "main"
        if by in failing:
            raise WriteError(f"cannot write {path}: no room")
        return write(path, *more)

    seen = {}
    monkeypatch.setattr(checkpoint, "write_vectors", full)
    train(data, tmp_path / "run", lambda record: seen.setdefault(record["round"], names(tmp_path / "run")))
    complete = {name for name in seen[6] if not name.endswith(".tmp")}  # others are being written
    assert complete <= {"round_000003", "round_000004", "round_000005"}
    assert names(tmp_path / "run")[-1] == "round_000006"
    failing.add("main")
    with pytest.raises(UserError, match=r"cannot write .*round_00000[34]\.tmp/server\.h5: no room"):
        train(data, tmp_path / "other")
    assert names(tmp_path / "other") == []


def test_a_folder_that_disappears_while_it_is_written_to_is_made_up_for(data, held, tmp_path):
    out = tmp_path / "run"

    def lost(record):
        if record["round"] == 3:
            shutil.rmtree(out / "checkpoint")
            held.set()

    train(data, out, lost)
    assert names(out)[-1] == "round_000006"
    assert not [name for name in names(out) if name.endswith(".tmp")]
