"""How the runs of a search are started on this machine, by a launcher, or as one element of an array job."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace

from ..experiments import PlannedRun, live
from ..experiments.parallel import Parallel
from ..experiments.sequential import execute_one
from ..experiments.starting import STOPS
from .search import Ended, Runner


def at_once(count: int, launcher: Sequence[str] = (), ranks: int | None = None, quiet: bool = False) -> Runner:
    """So many runs at a time, each with its output in its ``log.txt``."""

    def start(runs: Sequence[PlannedRun]) -> Ended:
        shown = live.possible() and not quiet
        started = Parallel([replace(run, ranks=ranks) for run in runs], launcher, count, shown)
        with ExitStack() as silenced:
            if quiet:
                silenced.enter_context(redirect_stdout(io.StringIO()))
            started.execute()
        # One that was not even started was refused, with a line that says why.
        refused = len(started.failed) > len(started.statuses)
        return Ended(started.stopped or int(refused), started.statuses)

    return start


def in_place(launcher: Sequence[str] = (), ranks: int | None = None) -> Runner:
    """One run, with its output where that of this process goes."""

    def start(runs: Sequence[PlannedRun]) -> Ended:
        (run,) = runs
        status = execute_one(replace(run.located(), ranks=ranks), launcher)
        return Ended(status, {}) if status in STOPS else Ended(0, {0: status} if status else {})

    return start
