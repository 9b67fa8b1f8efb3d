"""A rank that was stopped is ended by its neighbours, one that runs or sleeps is not."""

from __future__ import annotations

import signal
import subprocess

import pytest

from fedlada_mpi.mpi import watchdog


@pytest.fixture
def neighbour():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def watching(neighbour, monkeypatch):
    monkeypatch.setattr(watchdog, "PERIOD", 0.01)
    watching = watchdog.Watchdog([neighbour.pid])
    yield watching
    watching.close()


def test_a_stopped_one_is_ended(neighbour, watching, capfd):
    neighbour.send_signal(signal.SIGSTOP)
    assert neighbour.wait(100) == -signal.SIGKILL
    assert f"process {neighbour.pid} of this run was stopped" in capfd.readouterr().err


def test_one_that_sleeps_is_not(neighbour, watching):
    assert not watching.end_stuck()
    with pytest.raises(subprocess.TimeoutExpired):
        neighbour.wait(0.3)
