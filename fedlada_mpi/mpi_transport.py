"""Bcast and Reduce of flat vectors between ranks, planned once with their buffers."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from . import mpi_shared
from .errors import UserError
from .mpi import World, implementation

# Settings by which vendors' libraries are told, rather than asked, to take device buffers.
_TOLD_CUDA = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "I_MPI_OFFLOAD")


def cuda_aware() -> bool:
    """Whether the library says that it takes device buffers; unknown means no."""
    if any(os.environ.get(name) == "1" for name in _TOLD_CUDA):
        return True
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    query.restype, query.argtypes = ctypes.c_int, []
    return bool(query())


class Transport:
    """Bcast and Reduce of flat vectors of one size and type, planned once with its buffers.

    ``host``: buffers in host memory, moved as they are. ``direct``: device buffers given to a CUDA-aware
    library. ``staged``: device vectors through pinned host memory, in pieces, so that copies run beside the
    collective. ``shared``: through a shared-memory window within each node (``mpi_shared.py``).
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
            self._window = mpi_shared.Window(world, size, dtype, device)

    def _choose(self, kind: str) -> str:
        cuda = self.device.type == "cuda"
        if self.world.size == 1:
            return "none"
        if kind == "direct" and not (cuda and cuda_aware()):
            raise UserError(
                f"--transport direct: {implementation()} is not CUDA-aware here, or the run is on the CPU; use auto"
            )
        if kind == "staged" and not cuda:
            raise UserError("--transport staged copies device vectors, but the run is on the CPU: use auto or host")
        if kind == "host" and cuda:
            raise UserError(
                "--transport host needs vectors in host memory, but the run is on the GPU: use auto or staged"
            )
        fits = self._all(mpi_shared.fits(self.world, self.size * self.dtype.itemsize))
        if kind == "shared" and not fits:
            need = self.world.node.size * self.size * self.dtype.itemsize / 1e6
            raise UserError(f"--transport shared needs {need:.0f} MB in /dev/shm for the ranks of a node: use auto")
        if kind == "auto":
            # Within a node the window beats a CUDA-aware library too, whose Reduce adds up on the host.
            if fits and self._all(mpi_shared.worth_it(self.world, self.size * self.dtype.itemsize)):
                return "shared"
            if cuda and self._all(cuda_aware()) and self._all(self._device_buffers_work()):
                return "direct"
            return "staged" if cuda else "host"
        return kind

    def close(self) -> None:
        if self._window is not None:
            self._window.close()

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
        for vector in self._joined(vectors):
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
        for vector in self._joined(vectors):
            if self._window is not None:
                self._window.reduce(vector)
            elif self.kind == "staged":
                self._staged_reduce(vector)
            elif root:
                self.world.comm.Reduce(MPI.IN_PLACE, self._buffer(vector))
            else:
                self.world.comm.Reduce(self._buffer(vector), None)

    def _ready(self) -> None:
        """What the GPU still has to do for these vectors is done. (Callers wait for the other ranks first.)"""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _joined(self, vectors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The vectors, checked and counted; those that lie one after another travel in one call where that suffices."""
        step = self.size * self.dtype.itemsize
        for vector in vectors:
            assert vector.shape == (self.size,), f"planned for {self.size} elements, found {tuple(vector.shape)}"
            assert vector.dtype == self.dtype, f"planned for {self.dtype}, found {vector.dtype}"
            assert vector.is_contiguous()
            # Each rank but the root sends or receives the vector once.
            self.world.bytes_moved += (self.world.size - 1) * step
        first = vectors[0]
        same = all(v.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for v in vectors)
        adjacent = same and all(v.data_ptr() == first.data_ptr() + i * step for i, v in enumerate(vectors))
        if adjacent and self.kind in ("host", "direct"):
            return [first.as_strided((len(vectors) * self.size,), (1,))]
        return vectors

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
