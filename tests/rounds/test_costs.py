"""A run's figures: computed by hand, the same everywhere, and what really moved and was allocated."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from method_cases import BY_TIER
from ranks import SIZE, communicator, is_root
from training_runs import make_data, run_here

from fedlada_mpi.algorithms import create
from fedlada_mpi.mpi.shared_window import SharedWindowTransport
from fedlada_mpi.mpi.transport import HostTransport
from fedlada_mpi.rounds.clients import MemoryEstimate
from fedlada_mpi.rounds.costs import Costs, RankMemory, chunk_count, most_participants
from fedlada_mpi.rounds.evaluate import Evaluations
from fedlada_mpi.session import banner
from fedlada_mpi.session.assemble import Session
from fedlada_mpi.session.console import amount
from fedlada_mpi.session.training import Training
from fedlada_mpi.settings import Config
from fedlada_mpi.support import rng

SILOS = max(1, SIZE - 1)
CLIENTS = 2 * SILOS + 1


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "costs", [4 + i % 3 for i in range(CLIENTS)], silos=SILOS)


@pytest.fixture(scope="session")
def one_each(shared_tmp):
    """One client per silo."""
    return make_data(shared_tmp / "one-each", [9] * SILOS, silos=SILOS)


@pytest.fixture
def sessions(monkeypatch) -> list[Session]:
    """The sessions of the runs of a test, with their ``costs`` on the root."""
    ended, run, of = [], Training.run, banner.costs

    def kept(session, memory):
        session.costs = of(session, memory)
        return session.costs

    def remembered(self):
        try:
            return run(self)
        finally:
            ended.append(self.session)

    monkeypatch.setattr(banner, "costs", kept)
    monkeypatch.setattr(Training, "run", remembered)
    return ended


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """Bytes of every vector that this rank sends to the root or receives from it."""
    moved = []

    def counted(method):
        def move(self, vector):
            if self.world.rank != 0:
                moved.append(vector.nbytes)
            method(self, vector)

        return move

    for kind in (HostTransport, SharedWindowTransport):
        for name in ("_bcast", "_reduce"):
            monkeypatch.setattr(kind, name, counted(getattr(kind, name)))
    return moved


def over_ranks(value: int) -> list[int]:
    return [value] if SIZE == 1 else communicator().allgather(value)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [pytest.param("host", marks=pytest.mark.ranks(slow=True)), "shared"])
@pytest.mark.parametrize("algorithm", BY_TIER)
def test_bytes_are_those_that_moved(algorithm, kind, one_each, out, sessions, sent):
    """With one client per silo, what participants receive and send is what moves between ranks, but for padding."""
    run = run_here(one_each, out, algorithm=algorithm, transport=kind, rounds=3, local_steps=1)
    (session,) = sessions
    layout, a = session.network.layout, session.algorithm
    vectors = [len(a.down) + len(a.derived), 3 * (len(a.down) + len(a.up))]  # at the start, in three rounds
    assert over_ranks(sum(sent)) == [8 * layout.size * sum(vectors) * (rank > 0) for rank in range(SIZE)]
    for record in run.metrics:
        assert record["bytes_mpi"] == (SIZE - 1) * 8 * layout.size * (len(a.down) + len(a.up))
        both = record["bytes_down"] + record["bytes_up"]
        assert both * layout.size == layout.numel * (
            record["bytes_mpi"] if SIZE > 1 else 8 * layout.size * vectors[1] // 3
        )
        if is_root():
            costs = session.costs
            shown = costs.participants, costs.bytes_down, costs.bytes_up, costs.bytes_mpi
            assert shown == (len(record["participants"]), *(record[f"bytes_{k}"] for k in ("down", "up", "mpi")))
    for name in ("bytes_down", "bytes_up", "bytes_mpi", "paper_units"):
        assert run.summary[name] == sum(record[name] for record in run.metrics)


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize("algorithm", ["fedlada", "scaffold", "fedadam"])
@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize("sampling", ["fixed", "bernoulli"])
def test_clients_at_once_and_memory_are_those_allocated(algorithm, limit, sampling, data, out, sessions):
    run = run_here(
        data, out, algorithm=algorithm, sampling=sampling, participation=0.5, rounds=12, local_steps=1,
        max_clients_at_once=limit, seed=3,
    )  # fmt: skip
    (session,) = sessions
    silo, trainer = session.silo, session.silo.trainer
    buffers = trainer.buffers
    held = over_ranks(buffers.capacity)
    tensors = [*vars(silo.s).values(), *silo.aggregation.vectors.values(), silo.x_previous]
    for examples in (trainer.data.examples, *filter(None, [silo.evaluations.examples.get("test")])):
        tensors += [examples.inputs, examples.all_targets]
    tensors += [v for clients in trainer.client_state.vectors.values() for v in clients.values()]
    stacked = (
        [v for name, v in vars(buffers.c).items() if v is not None and name != "steps"] if buffers.capacity else []
    )
    if buffers.capacity and not buffers.uneven:
        tensors += [v for name, v in vars(buffers.tail).items() if v is not None and name != "steps"]
    trained = {client for participants in run.participants for client in participants}
    assert trained == set(range(CLIENTS)), "or they do not all hold their state"
    assert sum(v.nbytes for v in stacked) == buffers.capacity * buffers.state_bytes
    if buffers.capacity:
        assert sum(v.nbytes for v in tensors) == silo.memory.resident
    if is_root():
        assert session.costs.clients_at_once == max(held)
        assert session.costs.participants == (CLIENTS + 1) // 2
        assert (sampling == "fixed") == ({len(p) for p in run.participants} == {session.costs.participants})


@pytest.mark.ranks
def test_the_banner_by_hand(data, out, capsys):
    """Half of an odd number of clients is rounded up, as the draw does."""
    run = run_here(data, out, algorithm="fedlada", participation=0.5, rounds=1, local_steps=1)
    if not is_root():
        return
    printed = capsys.readouterr().out
    number, vector = SILOS + 1, 8 * len(data.start)
    each = amount(2 * number * vector)
    moved = amount((SIZE - 1) * 4 * 8 * data.network.layout.size)
    assert f"a round  {number} participants; x+v down {each}, offset+v_hat up {each}; MPI moves {moved}\n" in printed
    assert (
        f"communication  {each} down, {each} up, {2 * number} vectors in the paper's unit; MPI moved {moved}" in printed
    )
    assert re.search(r"memory   about [\d.]+ [kM]B per rank, for up to \d+ clients? at once\n", printed)
    assert len(run.participants[0]) == number


@pytest.mark.parametrize("instructions", [True, False])
def test_the_banner_says_what_is_computed_in_bf16(data, out, capsys, monkeypatch, instructions):
    monkeypatch.setattr("fedlada_mpi.rounds.device.cpu_flags", lambda: {"fp", "bf16"} if instructions else {"fp"})
    run_here(data, out, precision="bf16", rounds=1, local_steps=1)
    if not is_root():
        return
    printed = capsys.readouterr().out
    assert " parameters, bf16 forward and backward, fp32 states and sums, stacked\n" in printed
    note = "  note     this CPU has no bf16 instructions: bf16 is emulated, --precision fp32 is faster\n"
    assert (note in printed) != instructions


def test_who_trains_at_once_by_hand():
    assert [chunk_count(n, limit) for n, limit in ((0, 0), (5, 0), (5, 2), (4, 2), (0, 3))] == [0, 1, 3, 2, 0]
    config = Config(algorithm="fedavg", clients=50, participation=0.25, rounds=30, seed=1, max_clients_at_once=3)
    rank_of = 1 + np.arange(50) % 4
    drawn = [rng.participants(50, 0.25, "fixed", 1, t) for t in range(30)]
    assert {len(p) for p in drawn} == {13}
    most = [max(int((rank_of[p] == rank).sum()) for p in drawn) for rank in range(5)]
    assert most_participants(config, rank_of, 0).tolist() == most
    assert most_participants(config, rank_of, 29).tolist() == np.bincount(rank_of[drawn[29]], minlength=5).tolist()
    memory = [RankMemory(0, 1000, 0), *(RankMemory(10, 100 + rank, 0) for rank in range(4))]
    costs = Costs.of(config, create(config), 7, 99, rank_of, 0, memory)
    turns = -(-max(most) // 3)
    assert (costs.participants, costs.bytes_down, costs.bytes_up, costs.bytes_mpi) == (13, 91, 91, 99)
    assert (costs.most_participants, costs.clients_at_once) == (max(most), -(-max(most) // turns))
    assert costs.memory == 1000


def test_a_run_of_very_many_rounds_starts_at_once():
    config = Config(algorithm="fedavg", clients=50, participation=0.25, rounds=2**31 - 1)
    assert most_participants(config, np.arange(50) // 20, 0).tolist() == [13, 13, 10], "the most that there can be"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "before", [dict(ranks=SIZE + 1, transport="host"), dict(ranks=SIZE, transport="elsewhere"), {}]
)
def test_another_order_of_sums_after_a_resume_is_noted(before, data, out, capsys):
    import h5py

    from fedlada_mpi.rundir import checkpoint

    settings = dict(algorithm="fedavg", local_steps=1, transport="auto")
    run_here(data, out, rounds=1, **settings)
    if is_root():
        with h5py.File(checkpoint.folder(out, 1) / "server.h5", "r+") as file:
            now = json.loads(file.attrs["order_of_sums"])
            transport = "host" if SIZE > 1 else "none"
            assert now == {"ranks": SIZE, "transport": transport, "silo_per_rank": False, "nodes": 1}
            file.attrs["order_of_sums"] = json.dumps(before)
        (checkpoint.folder(out, 1) / "files.json").write_text('["server.h5"]')  # without its checksum
    capsys.readouterr()
    run_here(data, out, rounds=2, resume=True, **settings)
    if is_root():
        notes = [line for line in capsys.readouterr().out.splitlines() if "rounded in another order" in line]
        assert len(notes) == bool(before)
        for name in (name for name in before if before[name] != now[name]):
            assert f"{name} {before[name]} before and {now[name]} now" in notes[0]


def test_how_many_clients_fit_into_what_is_free(monkeypatch):
    """Images and other live data take their part of what torch holds; the clients' own buffers make way."""
    buffers = SimpleNamespace(device=SimpleNamespace(type="cuda"), capacity=2, state_bytes=100, compute=None)
    memory = MemoryEstimate(buffers, None, None)
    memory.__dict__["per_client"] = 100
    for name, value in {"mem_get_info": (1000, 5000), "memory_reserved": 3000, "memory_allocated": 2700}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory.clients_that_fit == 12  # 0.8 * (1000 + 300 + 2 * 100) / 100


@pytest.mark.ranks
def test_no_phase_is_longer_than_its_round(data, out, monkeypatch):
    """The rank that evaluates longest, too, whom the root waits for."""
    evaluate = Evaluations.__call__

    def slowly(self, *arguments):
        if communicator().rank == SIZE - 1:
            time.sleep(0.3)
        return evaluate(self, *arguments)

    monkeypatch.setattr(Evaluations, "__call__", slowly)
    run_here(data, out, rounds=1, local_steps=1)
    if is_root():
        seconds = json.loads((out / "metrics.jsonl").read_text())["seconds"]
        assert max(seconds.values()) == seconds["total"]
