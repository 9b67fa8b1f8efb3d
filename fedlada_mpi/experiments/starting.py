"""Starting a run of a grid: who may, how it is asked to stop, and how it ended."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from ..rundir import lock
from ..support.errors import UserError
from ..support.signals import STOPPED, handlers
from . import PlannedRun

# What ranks on other nodes take from the environment of the launcher. srun passes on everything, mpirun only what it is
# asked to.
PASSED_ON = ("FEDLADA_DATA", "OMP_NUM_THREADS")
# Statuses of a run that was stopped by a signal; other than ``STOPPED`` while it started.
STOPS = (STOPPED, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)


class OtherCodeError(UserError):
    """A run is finished, but was made by other code than it would be made by now."""


@contextmanager
def claimed(run: PlannedRun) -> Iterator[bool]:
    """Hold the run for a grid; False where nothing is to be done, as it is finished, or was by who held it before."""
    if run.finished():
        if changed := run.changed():
            raise OtherCodeError(
                f"{run.directory}: finished with other code, changed since: {', '.join(changed)}; --overwrite runs it "
                "again, --accept-changed-code keeps it"
            )
        yield False
        return
    with lock.hold(run.directory, lock.GRID):
        to_do = not run.finished()
        if to_do:
            lock.refuse_if_held(run.directory)  # a run that outlived the grid that started it, or one started by hand
        yield to_do


class StopSignals:
    """Passes SIGTERM and SIGUSR1 on to the runs at work, which write a checkpoint and end.

    Ctrl-C has reached them already, as they are in the same process group.
    """

    def __init__(self, launched: bool):
        self.launched = launched
        self.received: list[int] = []
        self.started: list[subprocess.Popen[bytes]] = []

    def handled(self) -> AbstractContextManager[None]:
        """Within the block, these signals come here."""
        return handlers((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), self._handle)

    @property
    def status(self) -> int:
        """The exit status that the first signal asks for, 0 where none has come."""
        if not self.received:
            return 0
        return 128 + signal.SIGINT if self.received[0] == signal.SIGINT else STOPPED

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] = os.environ, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a run; it gets the signals that have come just before, too."""
        known = [name for name in PASSED_ON if name in environment]
        # Open MPI may refuse both this and -x, which says the same.
        asked = {"OMPI_MCA_mca_base_env_list": ";".join(known)} if known and "-x" not in command else {}
        try:
            process = subprocess.Popen(command, env={**asked, **environment}, **options)
        except OSError as error:
            raise UserError(f"cannot start {command[0]}: {error.strerror} (see --launcher)") from None
        self.started.append(process)
        for number in self.received:
            self._pass_on(number, process)
        return process

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        for process in self.started:
            self._pass_on(number, process)

    def _pass_on(self, number: int, process: subprocess.Popen[bytes]) -> None:
        if number != signal.SIGINT:
            # mpirun ends its ranks at once on SIGTERM but forwards SIGUSR1 to them.
            process.send_signal(signal.SIGUSR1 if self.launched else number)


def compact(indices: Sequence[int]) -> str:
    """Indices as sbatch --array takes them: 0-3,7."""
    pieces = []
    for _, group in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        pieces.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(pieces)


def print_failed(failed: Sequence[int], of: int) -> None:
    if failed:
        print(f"error: {len(failed)} of {of} runs failed: {compact(sorted(failed))}", file=sys.stderr)
