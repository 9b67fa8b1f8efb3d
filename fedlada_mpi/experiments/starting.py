"""Starting a run of a grid: who may, how it is asked to stop, and how it ended."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

from ..rundir import lock
from ..rundir.files import remove_checkpoints
from ..support.errors import UserError
from ..support.signals import STOPPED, handlers
from . import PlannedRun
from .warm import ForkedRun, WarmProcess

Process = subprocess.Popen[bytes] | ForkedRun
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
                f"{run.directory}: finished with other code or defaults, changed since: {', '.join(changed)}; "
                "--overwrite runs it again, --accept-changed-code keeps it"
            )
        yield False
        return
    with lock.hold(run.directory, lock.GRID):
        to_do = not run.finished()
        if to_do:
            lock.refuse_if_held(run.directory)  # a run that outlived the grid that started it, or one started by hand
        yield to_do
        if not run.keep_checkpoints and run.finished():
            remove_checkpoints(run.directory)


class StopSignals:
    """Passes SIGTERM and SIGUSR1 on to the runs at work, which write a checkpoint and end.

    Ctrl-C has reached them already, as they are in the same process group. ``warm``: runs start from a warm process.
    """

    def __init__(self, launched: bool, warm: bool = False):
        self.launched = launched
        self.warm = WarmProcess() if warm else None
        self.received: list[int] = []
        self.started: list[Process] = []

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Within the block, these signals come here."""
        with handlers((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), self._handle):
            try:
                yield
            finally:
                if self.warm:
                    self.warm.close()

    @property
    def status(self) -> int:
        """The exit status that the first signal asks for, 0 where none has come."""
        if not self.received:
            return 0
        return 128 + signal.SIGINT if self.received[0] == signal.SIGINT else STOPPED

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] = os.environ, log: IO[Any] | None = None
    ) -> Process:
        """Start a run, which prints to the log if there is one; it gets the signals that have come just before, too."""
        before = len(self.received)
        known = [name for name in PASSED_ON if name in environment]
        # Open MPI may refuse both this and -x, which says the same.
        asked = {"OMPI_MCA_mca_base_env_list": ";".join(known)} if known and "-x" not in command else {}
        environment = {**asked, **environment}
        process: Process | None = self.warm.start(command, environment, log) if self.warm else None
        if process is None:
            process = self._in_new_interpreter(command, environment, log)
        self.started.append(process)
        for index, number in enumerate(self.received):
            self._pass_on(number, process)
            if number == signal.SIGINT and index >= before:  # which it may have been too young for
                process.send_signal(number)
        return process

    def _in_new_interpreter(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[Any] | None
    ) -> subprocess.Popen[bytes]:
        errors = None if log is None else subprocess.STDOUT
        try:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=errors)
        except OSError as error:
            raise UserError(f"cannot start {command[0]}: {error.strerror} (see --launcher)") from None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        for process in self.started:
            self._pass_on(number, process)

    def _pass_on(self, number: int, process: Process) -> None:
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
