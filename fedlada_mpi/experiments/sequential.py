"""The runs of a grid one after another, each with its output where that of the grid goes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from ..rundir import lock
from ..support.processes import exit_status
from ..support.signals import STOPPED
from . import PlannedRun
from .starting import STOPS, OtherCodeError, StopSignals, claimed, print_failed


def execute_one(run: PlannedRun, launcher: Sequence[str]) -> int:
    """Start one run unless it is finished; returns its exit status."""
    signals = StopSignals(bool(launcher))
    with signals.handled():
        return _execute(run, launcher, signals)


def execute_all(runs: Sequence[PlannedRun], launcher: Sequence[str]) -> int:
    """Start the runs that no other process is running; stops where one was stopped by a signal."""
    failed: list[int] = []
    signals = StopSignals(bool(launcher), warm=True)
    with signals.handled():
        for index, planned in enumerate(runs):
            run = planned.located()
            print(f"[{index + 1}/{len(runs)}] {run.directory.name}", flush=True)
            try:
                status = _execute(run, launcher, signals)
            except lock.Busy as busy:
                print(busy, flush=True)
                continue
            except OtherCodeError as other:
                print(f"error: {other}", file=sys.stderr, flush=True)
                failed.append(index)
                continue
            # A run that was about to end may not have seen the signal.
            if status in STOPS or signals.received:
                return status or STOPPED
            if status:
                print(f"{run.directory}: failed with status {status}", file=sys.stderr, flush=True)
                failed.append(index)
    print_failed(failed, len(runs))
    return 1 if failed else 0


def _execute(run: PlannedRun, launcher: Sequence[str], signals: StopSignals) -> int:
    with claimed(run) as to_do:
        if not to_do:
            print(f"{run.directory}: already finished", flush=True)
            return 0
        if signals.received:
            return signals.status
        command = run.command(launcher)
        print(shlex.join(command), flush=True)
        status = exit_status(signals.start(command).wait())
        if status == 0 and not run.finished():
            # As where a node was lost: what counts is what the run has written.
            done = f"{run.rounds_done()} of {run.rounds} rounds"
            print(f"error: {run.directory} ended with status 0 after {done}", file=sys.stderr, flush=True)
            return 1
        return status
