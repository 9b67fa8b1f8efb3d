"""Several runs of a grid at once on one machine, each with its output in a file of its own."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..gpu import mps
from ..rundir import lock
from ..support import disk
from ..support.processes import exit_status, usable_cores
from . import PlannedRun
from .live import LiveTable
from .starting import STOPS, OtherCodeError, Process, StopSignals, claimed, print_failed

LOG = "log.txt"  # what a run prints
SECONDS = 0.1  # between two looks at the runs


@dataclass
class Started:
    index: int
    run: PlannedRun
    slot: int  # of those that run at once
    process: Process
    held: ExitStack  # its lock and its log


class Parallel:
    """Starts the runs in order, ``at_once`` at a time; those that are finished or in use elsewhere are left out.

    Prints a line when a run starts and ends or, with ``live``, a table of all of them.
    """

    def __init__(self, runs: Sequence[PlannedRun], launcher: Sequence[str], at_once: int, live: bool = False):
        self.runs, self.launcher, self.at_once = list(runs), list(launcher), at_once
        self.table = LiveTable(self.runs, at_once) if live else None
        self.waiting = deque(range(len(runs)))
        self.slots = list(range(min(at_once, len(runs))))
        self.running: list[Started] = []
        self.failed: list[int] = []
        self.statuses: dict[int, int] = {}  # of those that were started and have failed
        self.signals = StopSignals(bool(launcher), warm=True)
        self.gpus = mps.gpus()

    def execute(self) -> int:
        """The exit status of all: 0, 1 where some failed, or that of a stop by a signal."""
        with ExitStack() as at_end:
            at_end.enter_context(self.signals.handled())
            share = 0 < len(self.gpus) < len(self.slots)
            places = at_end.enter_context(mps.shared()) if share else {}
            at_end.callback(self._end_all)
            while self.running or (self.waiting and not self.stopped):
                while self.slots and self.waiting and not self.stopped:
                    self._start(self.waiting.popleft(), places)
                self._collect()
                self._show()
            self._show(now=True)
        print_failed(self.failed, len(self.runs))
        return self.stopped or int(bool(self.failed))

    @property
    def stopped(self) -> int:
        """The exit status of a stop by a signal, after which no further runs start; 0 where none has come."""
        return self.signals.status

    def _say(self, index: int, words: str, error: bool = False) -> None:
        line = f"[{index + 1}/{len(self.runs)}] {self.runs[index].directory.name}: {words}"
        if self.table is None:
            print(line, file=sys.stderr if error else None, flush=True)
        elif error:  # the table shows the rest
            self.table.above(line)

    def _show(self, now: bool = False) -> None:
        if self.table is None:
            return
        note = ""
        if self.stopped:
            self.table.at_once = 0  # no end is to be expected
            rest = "stopping: the runs at work finish their round" if self.running else "stopped"
            note = f"{rest}; the same command goes on"
        self.table.show([started.index for started in self.running], self.failed, note, now)

    def _start(self, index: int, places: Mapping[str, str]) -> None:
        run = self.runs[index] = self.runs[index].located()
        with ExitStack() as held:
            try:
                to_do = held.enter_context(claimed(run))
            except lock.Busy as busy:
                self._say(index, str(busy))
                return
            except OtherCodeError as other:
                self.failed.append(index)
                self._say(index, str(other), error=True)
                return
            if not to_do:
                self._say(index, "already finished")
                return
            command = run.command(self.launcher)
            with disk.writing(run.directory / LOG, "then give the same command again"):
                log = held.enter_context(open(run.directory / LOG, "ab", buffering=0))
                log.write(os.fsencode(shlex.join(command) + "\n"))
            slot = self.slots.pop(0)
            environment = {**os.environ, **places, **self._share(slot)}
            process = self.signals.start(command, environment, log)
            self.running.append(Started(index, run, slot, process, held.pop_all()))
        self._say(index, f"started, prints to {run.directory / LOG}")

    def _share(self, slot: int) -> dict[str, str]:
        """The GPU of a slot, where there are several, and its part of the cores; a launcher places ranks itself."""
        if self.launcher or self.runs[0].ranks or self.at_once == 1:
            return {}
        share = {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]} if len(self.gpus) > 1 else {}
        if "OMP_NUM_THREADS" not in os.environ:
            share["OMP_NUM_THREADS"] = str(max(1, usable_cores() // (len(self.slots) + len(self.running) + 1)))
        return share

    def _collect(self) -> None:
        """Take note of the runs that have ended."""
        time.sleep(SECONDS)
        for started in [s for s in self.running if s.process.poll() is not None]:
            self.running.remove(started)
            self.slots = sorted([*self.slots, started.slot])
            started.held.close()
            status, run = exit_status(started.process.wait()), started.run
            done = f"{run.rounds_done()} of {run.rounds} rounds"
            if run.finished():
                self._say(started.index, f"finished, {run.rounds} rounds")
            elif self.stopped and status in (*STOPS, 1):  # 1: a Ctrl-C while Python itself was starting
                self._say(started.index, f"stopped after {done}")
            else:
                # A launcher may end with 0 where a node was lost: what counts is what the run has written.
                self.failed.append(started.index)
                self.statuses[started.index] = status
                self._say(started.index, f"failed with status {status} after {done}: see {run.directory / LOG}", True)

    def _end_all(self) -> None:
        """After an error of the grid itself: runs must not go on without their locks."""
        for started in self.running:
            started.process.terminate()
            started.process.wait()
            started.held.close()
