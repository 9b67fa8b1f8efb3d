"""The ranks of a run: start-up and launcher checks, failures, waiting, and small messages.

MPI is known to this module, ``mpi_transport.py`` (flat vectors) and ``mpi_shared.py`` (within a node) alone; every
collective is in one of them. Ranks that wait do not spin: they poll a non-blocking barrier with short sleeps, so
that waiting costs no core and Python signal handlers still run. Torch is not imported here: a wrong launcher is
found in the time that MPI itself takes to start.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

# Open MPI's UCX window component complains on every machine without UCX; shared windows do not use it.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")

import numpy as np
from mpi4py import MPI

from .errors import UserError

# What a launcher says it started: Open MPI's mpirun, an srun step, MPICH/Intel's mpiexec, MVAPICH, Flux.
_LAUNCHERS = (
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MVP_COMM_WORLD_SIZE",
    "FLUX_JOB_SIZE",
)
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")


def launched_with() -> int:
    """The number of processes that the launcher says it started, 1 if there was none."""
    for name in _LAUNCHERS:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


class World:
    """The ranks of this run, and the small messages between them."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        launched = launched_with()
        if self.size == 1 and launched > 1:
            kinds = "srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)"
            hint = kinds if "SLURM_STEP_NUM_TASKS" in os.environ else "the mpirun of the same MPI library"
            raise UserError(
                f"the launcher started {launched} processes, but MPI ({implementation()}) sees a world of 1: "
                f"start them with {hint}"
            )
        self.node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.seconds_waiting = 0.0
        self.bytes_moved = 0
        sys.excepthook = self._excepthook

    def close(self) -> None:
        self.wait()
        self.node.Free()
        self.comm.Free()
        sys.excepthook = sys.__excepthook__

    @property
    def local_rank(self) -> int:
        for name in _LOCAL_RANKS:
            if os.environ.get(name, "").isdigit():
                return int(os.environ[name])
        return self.node.rank

    def _excepthook(self, kind, error, trace) -> None:
        """An exception nobody caught ends every rank, with this rank's traceback once."""
        sys.stdout.flush()
        if isinstance(error, UserError):
            text = f"error: {error}\n"
        else:
            text = f"rank {self.rank} of {self.size} failed:\n" + "".join(
                traceback.format_exception(kind, error, trace)
            )
        sys.stderr.write(text)
        sys.stderr.flush()
        if self.size > 1:
            self.comm.Abort(2 if isinstance(error, UserError) else 1)

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            self._poll(self.comm.Ibarrier())

    def _poll(self, request: MPI.Request) -> None:
        start = time.perf_counter()
        while not request.Test():
            # A twentieth of the wait so far: what is about to happen is met soon, long waits cost nothing.
            time.sleep(min(max(2e-5, (time.perf_counter() - start) / 20), 1e-3))
        self.seconds_waiting += time.perf_counter() - start

    def tell(self, message: dict[str, Any] | None = None) -> dict[str, Any]:
        """Rank 0's small message, on every rank, as JSON."""
        if self.size == 1:
            return message or {}
        self.wait()
        text = np.frombuffer(json.dumps(message).encode(), np.uint8) if self.rank == 0 else None
        length = np.array(0 if text is None else len(text), np.int64)
        self.comm.Bcast(length)
        buffer = text.copy() if text is not None else np.empty(int(length), np.uint8)
        self.comm.Bcast(buffer)
        return json.loads(buffer.tobytes())

    def collect(self, row: Sequence[float]) -> np.ndarray:
        """Every rank's few numbers, [ranks, numbers], on rank 0 (elsewhere: empty)."""
        mine = np.asarray(row, np.float64)
        everyone = np.empty((self.size if self.rank == 0 else 0, len(mine)), np.float64)
        if self.size == 1:
            return mine[None]
        self.wait()
        self.comm.Gather(mine, everyone)
        return everyone

    def together(self, action: Callable[[], Any]) -> Any:
        """Do something that may fail on some ranks only; then all ranks raise, with the first one's words."""
        result, words = None, ""
        try:
            result = action()
        except UserError as error:
            words = str(error) or "failed"
        if self.size > 1:
            self.wait()
            lengths = np.empty(self.size, np.int64)
            text = words.encode()
            self.comm.Allgather(np.array(len(text), np.int64), lengths)
            failed = np.flatnonzero(lengths)
            if len(failed):
                first = int(failed[0])
                buffer = (
                    np.frombuffer(text, np.uint8).copy()
                    if self.rank == first
                    else np.empty(int(lengths[first]), np.uint8)
                )
                self.comm.Bcast(buffer, root=first)
                words = buffer.tobytes().decode()
        if words:
            raise UserError(words)
        return result

    def alone(self, action: Callable[[], Any]) -> Any:
        """Rank 0 alone acts; all ranks raise where it fails, and go on when it is done."""
        return self.together(action if self.rank == 0 else lambda: None)


def first_to_speak() -> bool:
    """Whether this process is the one that tells the user what all ranks know (in worlds of 1 by mistake: each)."""
    return MPI.COMM_WORLD.rank == 0


def implementation() -> str:
    """The MPI library's name and version, in a few words."""
    text = MPI.Get_library_version().replace("\0", "").strip()
    line = text.splitlines()[0]
    if line.startswith("MPICH Version"):
        return "MPICH " + line.split(":")[1].strip()
    return line.split(",")[0]
