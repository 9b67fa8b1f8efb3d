"""Ranks that were stopped (SIGSTOP): each rank watches the next one of its node, and kills it if it stays stopped.

MPI waits for a stopped process for ever, even where it goes on without dead ones. Killed, it is a dead one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from ..support.processes import state

PERIOD = 5.0  # seconds between looks
STOPPED, STUCK = "Tt", "D"  # states in /proc: by a signal or a debugger; in a call to a disk or another device
STOPPED_PERIODS = 4  # after which a rank is killed: those of a job that was suspended as a whole wake up sooner


class Watchdog:
    """Watches processes of this node in a thread, until ``close``."""

    def __init__(self, pids: Sequence[int]):
        self.pids = list(pids)
        self._seen: Counter[int] = Counter()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD):
            for pid in self.pids:
                self._seen[pid] = self._seen[pid] + 1 if state(pid) in STOPPED else 0
                if self._seen[pid] == STOPPED_PERIODS:
                    end(pid, f"was stopped for {STOPPED_PERIODS * PERIOD:.0f} s")

    def end_stuck(self) -> bool:
        """Kill those that are stopped or stuck now; returns whether there are any."""
        stuck = [pid for pid in self.pids if state(pid) in STOPPED + STUCK]
        for pid in stuck:
            end(pid, "does not go on")
        return bool(stuck)


def end(pid: int, why: str) -> None:
    sys.stderr.write(f"note: process {pid} of this run {why} and is ended\n")
    sys.stderr.flush()
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
