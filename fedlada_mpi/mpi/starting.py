"""The start of MPI, with a limit: a rank that was lost before it had joined keeps the others waiting for ever.

    with limited():
        initialise()

The limit counts in a thread that MPI must let run: mpi4py calls ``MPI_Init`` without giving way to other threads.
A process that no launcher has started waits for none, and starts MPI in ``alone``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ..support.errors import NO_ANSWER, UserError
from ..support.launcher import launched_processes
from ..support.start_record import LIMIT, LIMIT_SECONDS, start_limit
from .wait_limit import WaitLimit


@contextmanager
def limited() -> Iterator[None]:
    """Within the block, a rank that waits for the others to start gives up after ``start_limit()`` seconds."""
    try:
        seconds = start_limit() if launched_processes() > 1 else 0.0
    except UserError:  # which ``World`` raises, once all ranks are there and one can report it
        seconds = LIMIT_SECONDS

    def give_up() -> NoReturn:
        sys.stdout.flush()
        sys.stderr.write(
            f"error: a rank on {platform.node()} has waited {seconds:g} s for the other ranks to start: one of them is "
            f"lost, or they cannot reach each other: run it again; {LIMIT} sets the limit\n"
        )
        sys.stderr.flush()
        os._exit(NO_ANSWER)

    limit = WaitLimit(seconds, give_up)
    try:
        with limit:
            yield
    finally:
        limit.close()


# By which launchers tell a process of the others: PMIx, PMI, Open MPI's own, srun, MVAPICH, Flux, Cray's and IBM's.
_LAUNCHED = ("PMI", "OMPI_COMM_WORLD_", "SLURM_STEP_", "MV2_", "MVP_", "FLUX_", "PALS_", "ALPS_", "JSM_")
_NETWORKS = "OMPI_MCA_btl"


@contextmanager
def alone() -> Iterator[None]:
    """Within the block, a process without a launcher has Open MPI look for no network: its part for libfabric sleeps
    for a second where it finds none. Processes that are started later know nothing of it, and a choice of the user's
    stays."""
    if _NETWORKS in os.environ or any(name.startswith(_LAUNCHED) for name in os.environ):
        yield
        return
    os.environ[_NETWORKS] = "self"
    try:
        yield
    finally:
        del os.environ[_NETWORKS]


def initialise() -> None:
    """Start MPI as ``import mpi4py.MPI`` does, unless that was done before, but so that other threads run meanwhile."""
    import mpi4py

    if "mpi4py.MPI" in sys.modules or not mpi4py.rc.initialize or launched_processes() == 1:
        return
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = mpi4py.rc.finalize is not False
    from mpi4py import MPI

    if MPI.Is_initialized():
        return
    try:
        init = ctypes.CDLL(MPI.__file__).MPI_Init_thread
    except (OSError, AttributeError):  # a library that is linked in another way
        MPI.Init_thread()
        return
    level = getattr(MPI, f"THREAD_{mpi4py.rc.thread_level}".upper()) if mpi4py.rc.threads else MPI.THREAD_SINGLE
    if init(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int())):
        raise RuntimeError("MPI_Init_thread failed")
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # which become exceptions
