"""Signs of life between nodes, here of one process: two nodes of one rank each."""

import threading

import pytest

from fedlada_mpi.mpi import heartbeat
from fedlada_mpi.mpi.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "PERIOD", 0.05)
    monkeypatch.setattr(heartbeat, "SILENT", 30)


@pytest.fixture
def heartbeats():
    made = [Heartbeat(0), Heartbeat(3)]
    yield made
    for each in made:
        each.close()


def peers(heartbeats):
    return [each.own._replace(host=f"n{each.own.node}", addresses=["127.0.0.1"]) for each in heartbeats]


def test_a_node_that_falls_silent_is_missed(heartbeats):
    missed, alarm = [], threading.Event()

    def note(*words):
        missed.append(words)
        alarm.set()

    heartbeats[0].start(peers(heartbeats), "run", note)
    heartbeats[1].start(peers(heartbeats), "run", lambda *_: None)
    assert not alarm.wait(3), "twice as long as it may be silent"
    heartbeats[1].close()
    assert alarm.wait(60)
    host, seconds = missed[0]
    assert (host, seconds) == ("n3", pytest.approx(1.5))


@pytest.mark.parametrize("other", ["", "another run"])
def test_a_node_that_was_never_heard_is_not(heartbeats, other, monkeypatch):
    """Nothing comes from it, or what comes is of another run."""
    monkeypatch.setattr(heartbeat, "SILENT", 4)
    alarm = threading.Event()
    everyone = peers(heartbeats)
    heartbeats[0].start(everyone, "run", lambda *_: alarm.set())
    if other:
        heartbeats[1].start(everyone, "walk", lambda *_: None)
    assert not alarm.wait(0.8), "four times as long as it may be silent"


def test_closed_without_a_start():
    before = threading.active_count()
    Heartbeat(0).close()
    assert threading.active_count() == before
