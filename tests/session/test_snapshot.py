"""What a rank holds of the last rounds: it can go back to the round that all ranks have."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedlada_mpi.algorithms import ClientVectors, Vectors
from fedlada_mpi.rounds.clients import ClientState
from fedlada_mpi.rundir.history import History
from fedlada_mpi.rundir.provenance import Segments
from fedlada_mpi.session.recovery.snapshot import Snapshot


class Lost(Exception):
    pass


class World:
    """Of ranks of which one may be lost in the barrier."""

    def __init__(self):
        self.fails = False

    def barrier(self):
        if self.fails:
            raise Lost


def make_silo():
    state = ClientState(["c"])
    return SimpleNamespace(
        s=Vectors(x=torch.zeros(2)),
        x_previous=torch.zeros(2),
        previous_known=False,
        trainer=SimpleNamespace(client_state=state),
        world=World(),
    )


def train(silo, t, client):
    """Round ``t``: client ``client`` takes part, and x becomes t."""
    row = torch.full((1, 2), float(t))
    silo.trainer.client_state.store(ClientVectors(c=row), [client], np.array([True]))
    silo.x_previous.copy_(silo.s.x)
    silo.s.x.fill_(t)
    return {"record": {"round": t}, "clients": None}


@pytest.fixture
def silo():
    return make_silo()


@pytest.fixture
def snapshot(silo):
    return Snapshot(silo, 0, History([], Segments([], 0, "", {}), None, None))


def kept(silo):
    return {client: vector.tolist() for client, vector in silo.trainer.client_state.vectors["c"].items()}


def test_a_round_that_not_all_know_is_forgotten(silo, snapshot):
    snapshot.take(train(silo, 1, client=7))
    train(silo, 2, client=7)
    train(silo, 2, client=8)
    assert snapshot.latest == 1
    snapshot.back_to(1)
    assert (snapshot.s["x"].tolist(), snapshot.x_previous.tolist()) == ([1, 1], [0, 0])
    assert kept(silo) == {7: [1, 1]}, "client 8 had nothing, and client 7 what it had after round 1"
    assert [record["round"] for record in snapshot.history.records] == [1]


@pytest.mark.parametrize("agreed", [1, 2])
def test_a_rank_that_was_told_of_a_round_can_go_both_ways(silo, snapshot, agreed):
    """It does not know whether the others were told, too: it is lost in the barrier that would show it."""
    snapshot.take(train(silo, 1, client=7))
    done = train(silo, 2, client=7)
    silo.world.fails = True
    with pytest.raises(Lost):
        snapshot.take(done)
    assert snapshot.latest == 2
    snapshot.back_to(agreed)
    assert snapshot.s["x"].tolist() == [agreed] * 2
    assert kept(silo) == {7: [agreed] * 2}
    assert [record["round"] for record in snapshot.history.records] == [1, 2][:agreed]
    snapshot.back_to(agreed)  # again, where another rank is lost meanwhile
    assert snapshot.latest == agreed
