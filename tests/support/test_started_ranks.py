"""Ranks that ``-n`` has started: whose result it is, ranks that are lost before they join, and signals meanwhile.

A script takes the place of mpirun, and its children that of the ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from repository import ROOT

from fedlada_mpi.support import launcher, started_ranks
from fedlada_mpi.support.errors import NO_ANSWER, UserError
from fedlada_mpi.support.processes import state
from fedlada_mpi.support.start_record import LIMIT

RANKS = "for i in 1 2; do (exec -a module.of.ranks sleep 60) & echo $! >>{pids}; done"


def gone(pid: int) -> bool:
    return state(pid) in "ZX"


def wait_until(condition) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """``place.start(script)`` starts ranks by this script; ``place.pids`` are those of its ranks."""
    monkeypatch.setattr(started_ranks, "GRACE", 0.2)
    monkeypatch.setattr(launcher, "tolerance", lambda mpirun: [])
    monkeypatch.setattr(launcher, "_mpirun", lambda: str(tmp_path / "mpirun"))

    class Place:
        @staticmethod
        def write(script: str) -> None:
            path = tmp_path / "mpirun"
            path.write_text("#!/bin/bash\n" + script.replace("RANKS", RANKS.format(pids=tmp_path / "pids")))
            path.chmod(0o755)

        def start(self, script: str) -> int:
            self.write(script)
            return launcher.start("module.of.ranks", 2, [])

        @property
        def pids(self) -> list[int]:
            path = tmp_path / "pids"
            return [int(line) for line in path.read_text().split()] if path.exists() else []

    yield Place()
    for pid in Place().pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_0_of_mpirun_counts_where_a_rank_has_come_to_the_end(place, capfd):
    """Whatever results of an earlier run there are: mpirun says 0 also where all ranks were killed."""
    assert place.start('touch "$FEDLADA_START/joined" "$FEDLADA_START/complete"') == 0
    assert capfd.readouterr().err == ""
    for joined in ("", 'touch "$FEDLADA_START/joined"'):
        assert place.start(joined) == NO_ANSWER
        assert capfd.readouterr().err.startswith("error: all ranks were lost: run it again, with --resume")


def test_other_statuses_pass_through(place):
    assert place.start("exit 75") == 75


def test_a_rank_that_is_lost_before_all_have_joined_ends_them(place, capfd):
    assert place.start("RANKS; sleep 0.3; kill -9 $!; wait") == NO_ANSWER
    first, second = place.pids
    assert gone(first)
    assert capfd.readouterr().err == f"error: process {second} has ended before all ranks had started: run it again\n"


def test_a_rank_that_was_never_seen_is_missed(place, capfd):
    """It was lost between two looks at the ranks, and mpirun has taken note of it."""
    one = "(exec -a module.of.ranks sleep 60) & wait"
    assert place.start(one) == NO_ANSWER
    assert capfd.readouterr().err == "error: 1 of 2 processes has ended before all ranks had started: run it again\n"


def test_what_mpirun_has_forked_is_no_rank_before_it_is_another_program(place, capfd):
    """Until then it has the command line of mpirun, with the ranks' module; it may start them all, as MPICH does."""
    assert place.start("(sleep 0.5; exec -a starter sleep 0.2) & wait; exit 7") == 7
    assert capfd.readouterr().err == ""


def test_one_that_is_lost_later_is_for_the_others_to_notice(place):
    assert place.start('RANKS; sleep 0.3; touch "$FEDLADA_START/joined"; kill -9 $!; sleep 0.6; kill %1; exit 7') == 7


def test_a_start_that_takes_too_long(place, monkeypatch, capfd):
    monkeypatch.setenv(LIMIT, "0.5")
    assert place.start("RANKS; wait") == NO_ANSWER
    assert (
        capfd.readouterr().err
        == f"error: the ranks have not started within 0.5 s ({LIMIT} sets the limit): run it again\n"
    )
    assert all(map(gone, place.pids))
    monkeypatch.setenv(LIMIT, "soon")
    with pytest.raises(UserError, match=f"{LIMIT}: got 'soon', expected seconds from 0"):
        place.start("exit")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_all_have_joined_ends_them_at_once(place, number, capfd):
    def interrupt() -> None:
        wait_until(lambda: len(place.pids) == 2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert place.start("trap '' USR1; RANKS; wait") == 128 + number
    thread.join()
    assert all(map(gone, place.pids))
    assert "stopped before all ranks had started" in capfd.readouterr().err


def test_two_signals_end_ranks_that_do_not_listen(place, monkeypatch, capfd):
    monkeypatch.setattr(started_ranks, "AFTER_SECOND", 0.2)
    monkeypatch.setattr(started_ranks, "TO_END", 0.2)
    monkeypatch.setattr(started_ranks, "SAME", 0.0)

    def interrupt() -> None:
        wait_until(lambda: len(place.pids) == 2)
        for _ in range(2):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = place.start("trap '' USR1 TERM; touch \"$FEDLADA_START/joined\"; RANKS; while true; do wait; done")
    thread.join()
    assert code == 128 + signal.SIGKILL
    assert all(map(gone, place.pids))
    assert capfd.readouterr().err == "\nstopping after this round; Ctrl-C again stops at once\n"


def test_ranks_do_not_outlive_mpirun(place, capfd):
    assert place.start("RANKS; kill -9 $$") == 128 + signal.SIGKILL
    assert all(map(gone, place.pids))
    assert "error: mpirun was ended by signal 9, and its ranks: run it again" in capfd.readouterr().err


def test_mpirun_does_not_outlive_who_started_it(place, tmp_path):
    place.write(f"trap 'trap - TERM; kill $(cat {tmp_path / 'pids'})' TERM; RANKS; echo $$ >>{tmp_path / 'pids'}; wait")
    script = (
        "from fedlada_mpi.support import launcher; launcher.tolerance = lambda mpirun: [];"
        f"launcher._mpirun = lambda: {str(tmp_path / 'mpirun')!r}; launcher.start('module.of.ranks', 2, [])"
    )
    started = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: len(place.pids) == 3)
    started.kill()
    started.wait()
    wait_until(lambda: all(map(gone, place.pids)))
