"""All of MPI: start-up and launcher checks, failures, and the planned transport of flat vectors.

Every collective of the program is in this module. Ranks that wait do not spin: they poll a non-blocking
barrier with short sleeps, so that waiting costs no core and Python signal handlers still run; the vectors
themselves then move in blocking calls on buffers allocated once.
"""

from __future__ import annotations

import ctypes
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
import torch
from mpi4py import MPI
from torch import Tensor

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
# Settings by which vendors' libraries are told, rather than asked, to take device buffers.
_TOLD_CUDA = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "I_MPI_OFFLOAD")


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
                f"the launcher started {launched} processes, but MPI ({library()}) sees a world of 1: "
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
        start, pause = time.perf_counter(), 2e-5
        while not request.Test():
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
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


def library() -> str:
    """The MPI library's name and version, in a few words."""
    text = MPI.Get_library_version().replace("\0", "").strip()
    line = text.splitlines()[0]
    if line.startswith("MPICH Version"):
        return "MPICH " + line.split(":")[1].strip()
    return line.split(",")[0]


def cuda_aware() -> bool:
    """Whether the library says that it takes device buffers; unknown means no."""
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return any(os.environ.get(name) == "1" for name in _TOLD_CUDA)
    query.restype, query.argtypes = ctypes.c_int, []
    return bool(query()) or any(os.environ.get(name) == "1" for name in _TOLD_CUDA)


class Transport:
    """Bcast and Reduce of flat vectors of one size and type, planned once with its buffers.

    ``host``: buffers in host memory, moved as they are. ``direct``: device buffers given to a CUDA-aware
    library. ``staged``: device vectors through pinned host memory, in pieces, so that copies run beside the
    collective. ``shared``: through a shared-memory window within each node (``shared.py``).
    """

    PIECE = 1 << 22  # elements; 16 MB of float32, enough to hide the copies' start-up

    def __init__(self, world: World, size: int, dtype: torch.dtype, device: torch.device, kind: str = "auto"):
        self.world, self.size, self.dtype, self.device = world, size, dtype, device
        self.kind = self._choose(kind)
        self._pieces: list[Tensor] = []
        self._window = None
        if self.kind == "staged":
            self._pieces = [torch.empty(min(self.PIECE, size), dtype=dtype, pin_memory=True) for _ in range(2)]
            self._copies = torch.cuda.Stream(device)
        elif self.kind == "shared":
            from .mpi_shared import Window

            self._window = Window(world, size, dtype, device)

    def _choose(self, kind: str) -> str:
        from . import mpi_shared

        cuda = self.device.type == "cuda"
        if self.world.size == 1:
            return "none"
        if kind == "direct" and not (cuda and cuda_aware()):
            raise UserError(
                f"--transport direct: {library()} is not CUDA-aware here, or the run is on the CPU; use auto"
            )
        if kind == "staged" and not cuda:
            raise UserError("--transport staged copies device vectors, but the run is on the CPU: use auto or host")
        if kind == "host" and cuda:
            raise UserError(
                "--transport host needs vectors in host memory, but the run is on the GPU: use auto or staged"
            )
        if kind == "auto":
            # Within a node the window beats a CUDA-aware library too, whose Reduce adds up on the host.
            if self._all(mpi_shared.fits(self.world, self.size * self.dtype.itemsize)):
                return "shared"
            if cuda and self._all(cuda_aware()) and self._all(self._device_buffers_work()):
                return "direct"
            return "staged" if cuda else "host"
        return kind

    def _all(self, true_here: bool) -> bool:
        """Whether it is so on every rank."""
        flag = np.array(int(true_here))
        self.world.wait()
        self.world.comm.Allreduce(MPI.IN_PLACE, flag, MPI.MIN)
        return bool(flag)

    def _device_buffers_work(self) -> bool:
        """A tiny Reduce on device memory, checked; a library that only claims support fails here."""
        probe = torch.full((4,), float(self.world.rank + 1), device=self.device)
        torch.cuda.synchronize(self.device)
        try:
            self.world.comm.Allreduce(MPI.IN_PLACE, probe)
        except (MPI.Exception, TypeError, ValueError):
            return False
        return bool((probe == self.world.size * (self.world.size + 1) / 2).all())

    def bcast(self, vectors: Sequence[Tensor]) -> None:
        """Rank 0's vectors, on every rank, in place."""
        if self.kind == "none":
            return
        self._ready()
        for vector in vectors:
            self._count(vector)
            if self._window is not None:
                self._window.bcast(vector)
            elif self.kind == "staged":
                self._staged_bcast(vector)
            else:
                self.world.comm.Bcast(self._buffer(vector))

    def reduce(self, vectors: Sequence[Tensor]) -> None:
        """The sum over ranks, in place on rank 0; the others' vectors keep what they hold."""
        if self.kind == "none":
            return
        self._ready()
        root = self.world.rank == 0
        for vector in vectors:
            self._count(vector)
            if self._window is not None:
                self._window.reduce(vector)
            elif self.kind == "staged":
                self._staged_reduce(vector)
            elif root:
                self.world.comm.Reduce(MPI.IN_PLACE, self._buffer(vector))
            else:
                self.world.comm.Reduce(self._buffer(vector), None)

    def _ready(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.world.wait()

    def _count(self, vector: Tensor) -> None:
        assert vector.shape == (self.size,), f"planned for {self.size} elements, found {tuple(vector.shape)}"
        assert vector.dtype == self.dtype, f"planned for {self.dtype}, found {vector.dtype}"
        assert vector.is_contiguous()
        # Each rank but the root sends or receives the vector once.
        self.world.bytes_moved += (self.world.size - 1) * self.size * self.dtype.itemsize

    @staticmethod
    def _buffer(vector: Tensor):
        return vector if vector.is_cuda else vector.numpy()

    def _staged_bcast(self, vector: Tensor) -> None:
        """The root copies piece i+1 down while piece i is sent; the others copy piece i up while i+1 arrives."""
        root, done = self.world.rank == 0, [None, None]
        parts = vector.split(self.PIECE)
        with torch.cuda.stream(self._copies):
            if root:
                done[0] = self._copy(self._pieces[0][: len(parts[0])], parts[0])
            for i, part in enumerate(parts):
                piece = self._pieces[i % 2][: len(part)]
                if done[i % 2] is not None:
                    done[i % 2].synchronize()
                if root and i + 1 < len(parts):
                    done[(i + 1) % 2] = self._copy(self._pieces[(i + 1) % 2][: len(parts[i + 1])], parts[i + 1])
                self.world.comm.Bcast(piece.numpy())
                if not root:
                    done[i % 2] = self._copy(part, piece)
        self._copies.synchronize()

    def _staged_reduce(self, vector: Tensor) -> None:
        """Piece i+1 is copied down while piece i is summed; the root copies sums up behind it."""
        root = self.world.rank == 0
        parts = vector.split(self.PIECE)
        with torch.cuda.stream(self._copies):
            down = [self._copy(self._pieces[0][: len(parts[0])], parts[0]), None]
            for i, part in enumerate(parts):
                piece = self._pieces[i % 2][: len(part)]
                down[i % 2].synchronize()
                if i + 1 < len(parts):
                    down[(i + 1) % 2] = self._copy(self._pieces[(i + 1) % 2][: len(parts[i + 1])], parts[i + 1])
                if root:
                    self.world.comm.Reduce(MPI.IN_PLACE, piece.numpy())
                    self._copy(part, piece)
                else:
                    self.world.comm.Reduce(piece.numpy(), None)
        self._copies.synchronize()

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._copies)
        return event


def plain_bcast(world: World, vector: Tensor) -> None:
    """The library's own Bcast, to measure against."""
    world.comm.Bcast(vector.numpy())


def plain_reduce(world: World, vector: Tensor) -> None:
    """The library's own Reduce, to measure against."""
    if world.rank == 0:
        world.comm.Reduce(MPI.IN_PLACE, vector.numpy())
    else:
        world.comm.Reduce(vector.numpy(), None)


def slowest(world: World, action: Callable[[], None], repeats: int) -> float:
    """Median over repetitions of the slowest rank's seconds for a collective."""
    seconds = np.empty(repeats)
    for i in range(repeats + 2):
        world.comm.Barrier()
        start = time.perf_counter()
        action()
        seconds[i - 2] = time.perf_counter() - start
    world.comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return float(np.median(seconds))
