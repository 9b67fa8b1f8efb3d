"""Starting a run of a grid: who may, how it is told to stop, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..rundir import lock
from ..support.errors import UserError
from ..support.signals import STOPPED
from . import Run

# What ranks on other nodes take from the environment of the launcher. srun passes on everything, mpirun only what it is
# asked to.
PASSED_ON = ("FEDLADA_DATA", "OMP_NUM_THREADS")
STOPS = (STOPPED, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # statuses of a run that was stopped by a signal


@contextmanager
def claimed(run: Run) -> Iterator[bool]:
    """Hold the run for a grid; whether it is still to be done, as it may have been finished by who held it before."""
    with lock.hold(run.directory, lock.GRID):
        to_do = not run.finished()
        if to_do:
            lock.refuse_if_held(run.directory)  # a run that outlived the grid that started it, or one started by hand
        yield to_do


def start(
    command: Sequence[str], environment: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[bytes]:  # fmt: skip
    known = [name for name in PASSED_ON if name in environment]
    # Open MPI may refuse both this and -x, which says the same.
    asked = {"OMPI_MCA_mca_base_env_list": ";".join(known)} if known and "-x" not in command else {}
    try:
        return subprocess.Popen(command, env={**asked, **environment}, **options)
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror} (see --launcher)") from None


def passed_on(number: int, launched: bool) -> int:
    """The signal that asks a run to stop: mpirun ends its ranks at once on SIGTERM but forwards SIGUSR1 to them."""
    return signal.SIGUSR1 if launched else number


def exit_status(returncode: int) -> int:
    """As a shell has it: 128 and the number of the signal that ended a process."""
    return returncode if returncode >= 0 else 128 - returncode
