"""Ranks that were stopped (SIGSTOP): each rank watches the next one of its node, and kills it if it stays stopped.

MPI waits for a stopped process for ever, even where it goes on without dead ones. Killed, it is a dead one. So does it
wait for one that has exited, as by ``os._exit``: such ``gone`` ones are for the caller to judge.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence

from ..support.processes import ENDED, ProcessId

PERIOD = 5.0  # seconds between looks
STOPPED, STUCK = "Tt", "D"  # states in /proc: by a signal or a debugger; in a call to a disk or another device
STOPPED_PERIODS = 4  # after which a rank is killed: those of a job that was suspended as a whole wake up sooner


class Watchdog:
    """Watches processes of this node in a thread, until ``close``."""

    def __init__(self, processes: Sequence[ProcessId]):
        self.processes = list(processes)
        self._seen: Counter[ProcessId] = Counter()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD):
            for process in self.processes:
                self._seen[process] = self._seen[process] + 1 if process.state in STOPPED else 0
                if self._seen[process] == STOPPED_PERIODS:
                    end(process, f"was stopped for {STOPPED_PERIODS * PERIOD:.0f} s")

    def end_stuck(self) -> bool:
        """Kill those that are stopped or stuck now; returns whether there are any."""
        stuck = [process for process in self.processes if process.state in STOPPED + STUCK]
        for process in stuck:
            end(process, "does not go on")
        return bool(stuck)

    @property
    def gone(self) -> list[ProcessId]:
        """Those that have ended."""
        return [process for process in self.processes if process.state in ENDED]


def end(process: ProcessId, why: str) -> None:
    sys.stderr.write(f"note: process {process.pid} of this run {why} and is ended\n")
    sys.stderr.flush()
    process.kill()
