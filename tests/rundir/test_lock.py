"""The lock of a run directory: when it holds, and when another process may take it over."""

import json
import os
import subprocess
import threading
import time

import pytest
from hostile import OBSTACLES, damage_file
from ranks import python

from fedlada_mpi.rundir import lock
from fedlada_mpi.support import disk
from fedlada_mpi.support.processes import ProcessId, start_time


def owned_by(directory, **changes):
    directory.mkdir(exist_ok=True)
    owner = {"token": "t", "host": "elsewhere", "pid": 1, "started": "", "job": "", "restart": 0, **changes}
    (directory / lock.NAME).write_text(json.dumps(owner))


def test_a_lock_elsewhere_holds_while_its_heart_beats(tmp_path):
    owned_by(tmp_path)
    with pytest.raises(lock.Busy, match="process 1 on elsewhere"), lock.hold(tmp_path):
        pass
    old = time.time() - lock.STALE_SECONDS - 5
    os.utime(tmp_path / lock.NAME, (old, old))
    with lock.hold(tmp_path):
        assert lock.owner(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_a_dead_process_or_a_reused_number_is_taken_over(tmp_path):
    host = lock._me()["host"]
    gone = subprocess.Popen([python(), "-c", ""])
    gone.wait()
    for number, started in ((gone.pid, ""), (os.getpid(), "1")):
        owned_by(tmp_path, host=host, pid=number, started=started)
        with lock.hold(tmp_path):
            pass
    owned_by(tmp_path, host=host, pid=os.getpid(), started=start_time(os.getpid()))
    with pytest.raises(lock.Busy), lock.hold(tmp_path):
        pass


def test_a_rank_that_seems_lost_is_when_its_heart_does_not_beat(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SILENT_SECONDS", 1.5)
    gone = {ProcessId("elsewhere", 1)}
    owned_by(tmp_path)
    begin = time.monotonic()
    with lock.hold(tmp_path, gone=gone):
        assert time.monotonic() - begin >= 1, "there was time for a beat"
        assert lock.is_mine(tmp_path)
    owned_by(tmp_path)
    assert not lock.is_mine(tmp_path)
    beats = threading.Timer(0.3, os.utime, (tmp_path / lock.NAME,))
    beats.start()
    with pytest.raises(lock.Busy), lock.hold(tmp_path, gone=gone):
        pass


@pytest.mark.parametrize("name", ["boot", "namespace"])
def test_another_container_with_this_host_name_holds_while_its_heart_beats(name, tmp_path):
    """Its pid says nothing here: there may be no such process, or it may be another's."""
    owned_by(tmp_path, **{**lock._me(), "pid": 2**22 + 1, name: "another"})
    with pytest.raises(lock.Busy, match=f"process {2**22 + 1} on"), lock.hold(tmp_path):
        pass
    os.utime(tmp_path / lock.NAME, (0, 0))
    with lock.hold(tmp_path):
        pass


def test_a_lock_that_was_taken_is_not_renewed_and_nothing_more_is_written(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    beaten = threading.Event()
    with lock.hold(tmp_path):
        lock.keep(tmp_path)
        monkeypatch.setattr(lock.os, "utime", lambda path: beaten.set())
        assert beaten.wait(100)
        owned_by(tmp_path)
        (thread,) = (thread for thread in threading.enumerate() if thread.name.endswith("(beat)"))
        thread.join(100)
        assert not thread.is_alive()
        with pytest.raises(
            lock.Busy, match=r"run.lock was taken over by process 1 on elsewhere: nothing more is written"
        ):
            lock.keep(tmp_path)
    assert capfd.readouterr().err.count("note: ") == 1
    assert (tmp_path / lock.NAME).exists(), "it is another's"


def test_a_lock_that_was_removed_is_taken_again(tmp_path):
    with lock.hold(tmp_path):
        before = (tmp_path / lock.NAME).read_text()
        (tmp_path / lock.NAME).unlink()
        lock.keep(tmp_path)
        assert (tmp_path / lock.NAME).read_text() == before
    assert not (tmp_path / lock.NAME).exists()


def test_a_requeued_job_takes_over_its_own_lock_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    owned_by(tmp_path, job="77", restart=0)
    with pytest.raises(lock.Busy, match="SLURM job 77"), lock.hold(tmp_path):
        pass
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with lock.hold(tmp_path):
        pass
    owned_by(tmp_path, job="78", restart=0)
    with pytest.raises(lock.Busy), lock.hold(tmp_path):
        pass


def test_a_lock_whose_owner_was_killed_as_it_took_it(tmp_path, monkeypatch):
    """Its file names nobody: a process waits a little for the owner's name, and takes it over if none comes."""
    (tmp_path / lock.NAME).write_text('{"tok')
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            old = time.time() - lock.UNWRITTEN_SECONDS - 1
            os.utime(tmp_path / lock.NAME, (old, old))

    monkeypatch.setattr(lock.time, "sleep", nap)
    with lock.hold(tmp_path):
        assert len(naps) == 3
    (tmp_path / lock.NAME).write_text("")
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: owned_by(tmp_path))
    with pytest.raises(lock.Busy, match="process 1 on elsewhere"), lock.hold(tmp_path):
        pass


def test_a_lock_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    for name in ("open", "fdopen"):
        with monkeypatch.context() as patch:
            patch.setattr(lock.os, name, full)
            with pytest.raises(disk.WriteError, match=r"run.lock: No space left .* make room"), lock.hold(tmp_path):
                pass
    assert list(tmp_path.iterdir()) == []


def test_the_heart_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with lock.hold(tmp_path):
        os.utime(tmp_path / lock.NAME, (0, 0))
        deadline = time.monotonic() + 100
        while (tmp_path / lock.NAME).stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("changes", [{"pid": 10**30}, {"pid": -1}, {"pid": "x"}, {"restart": "x"}, {"job": 7}])
def test_a_lock_that_names_no_process_goes_stale_too(changes, tmp_path):
    owned_by(tmp_path, **{"host": lock._me()["host"], **changes})
    assert lock.owner(tmp_path) == "process ? on ?"
    os.utime(tmp_path / lock.NAME, (0, 0))
    with lock.hold(tmp_path):
        pass


@pytest.mark.parametrize("kind", sorted({*OBSTACLES} - {"missing"}))
def test_something_else_in_the_place_of_the_lock(kind, tmp_path):
    damage_file(tmp_path / lock.NAME, kind)
    with pytest.raises(lock.Busy), lock.hold(tmp_path):
        pass
