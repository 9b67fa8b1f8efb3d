"""A rank that was stopped is ended by its neighbours, one that runs or sleeps is not."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from fedlada_mpi.mpi import watchdog
from fedlada_mpi.support.processes import start_time, this_process


@pytest.fixture
def neighbour():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def watching(neighbour, monkeypatch):
    monkeypatch.setattr(watchdog, "PERIOD", 0.01)
    process = this_process()._replace(pid=neighbour.pid, started=start_time(neighbour.pid))
    watching = watchdog.Watchdog([process])
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
    assert not watching.gone


def test_one_that_has_ended_is_gone_before_its_parent_waits_for_it(neighbour, watching):
    neighbour.kill()
    while not watching.gone:
        time.sleep(0.01)
    assert [process.pid for process in watching.gone] == [neighbour.pid]
