"""Vectors through a shared-memory window: one copy per rank within a node, `Reduce` and `Bcast` between nodes only.

A node's ranks each own a segment of the window. To reduce, each copies its vector in, sums its own slice over
all segments into the leader's, and the leaders add up between nodes. To broadcast, the leader's segment is
filled once and every rank copies from it. Device vectors are copied straight to and from the window, whose
memory is page-locked.

Every node decides for itself: where it has one rank, or no room for a window, its ranks are leaders of their own.
"""

from __future__ import annotations

import ctypes
import os
from typing import cast

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from .transport import Transport
from .world import World

BLOCK = 1 << 16  # elements summed at a time: all ranks' blocks stay in the cache
WORTH_IT = 1 << 22  # bytes of a window; below, the library's own collectives beat the window's four barriers
HEADROOM = 1.2  # of /dev/shm, over what the window takes


def worth_it(world: World, bytes_per_vector: int, least: int = WORTH_IT) -> bool:
    """Whether this node gains by a window, and has room for it."""
    window = world.node.size * bytes_per_vector
    return world.node.size > 1 and window >= least and fits(world, bytes_per_vector)


def fits(world: World, bytes_per_vector: int) -> bool:
    """Whether /dev/shm has room for this node's window, with some to spare."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return False
    return stat.f_bavail * stat.f_frsize > HEADROOM * world.node.size * bytes_per_vector


class SharedWindowTransport(Transport):
    kind = "shared"

    def __init__(self, world: World, size: int, dtype: torch.dtype, device: torch.device):
        super().__init__(world, size, dtype, device)
        # The ranks of a window: the node's, or this one alone.
        alone = not world.holds_on_node(worth_it(world, size * dtype.itemsize, least=0))
        self.node = cast(MPI.Intracomm, world.node.Split(world.node.rank if alone else 0, world.node.rank))
        self.leaders = world.comm.Split(0 if self.node.rank == 0 else MPI.UNDEFINED, world.rank)
        world.communicators += [comm for comm in (self.node, self.leaders) if comm != MPI.COMM_NULL]
        self._numpy_type = np.dtype(str(dtype).removeprefix("torch."))
        self._window: MPI.Win | None = None
        if alone:
            self._segments = [np.empty(size, self._numpy_type)]
        else:
            self._window = MPI.Win.Allocate_shared(size * dtype.itemsize, dtype.itemsize, comm=self.node)
            self._window.Lock_all()  # MPICH takes Sync only between locks
            self._segments = [self._segment(self._window, rank) for rank in range(self.node.size)]
        self._mine = torch.from_numpy(self._segments[self.node.rank])
        self._leader = torch.from_numpy(self._segments[0])
        bounds = np.linspace(0, size, self.node.size + 1).astype(int) // 16 * 16
        bounds[-1] = size
        self._slice = (int(bounds[self.node.rank]), int(bounds[self.node.rank + 1]))
        self._mine.zero_()  # first touch by its owner, so that the pages are close to it
        if device.type == "cuda":
            for segment in {0, self.node.rank}:
                array = self._segments[segment]
                torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)

    def close(self) -> None:
        if self.device.type == "cuda":
            for segment in {0, self.node.rank}:
                torch.cuda.cudart().cudaHostUnregister(self._segments[segment].ctypes.data)
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
        if self.node.rank == 0:
            self.leaders.Free()
        self.node.Free()

    def _segment(self, window: MPI.Win, rank: int) -> np.ndarray:
        memory, _ = window.Shared_query(rank)
        array_type = ctypes.c_char * (self.size * self._numpy_type.itemsize)
        return np.frombuffer(memoryview(array_type.from_address(memory.address)), self._numpy_type)

    def _node_barrier(self) -> None:
        """All of the node's ranks are here, and see what the others wrote."""
        if self._window is not None:
            self._window.Sync()
            self.world.wait_for(self.node.Ibarrier())
            self._window.Sync()

    def _reduce(self, vector: Tensor) -> None:
        self._copy(self._mine, vector)
        self._node_barrier()
        first, last = self._slice
        total = self._segments[0]
        for start in range(first, last, BLOCK):
            part = slice(start, min(start + BLOCK, last))
            for segment in self._segments[1:]:
                np.add(total[part], segment[part], out=total[part])
        self._node_barrier()
        if self.node.rank == 0:
            if self.leaders.size > 1:
                if self.world.rank == 0:
                    self.leaders.Reduce(MPI.IN_PLACE, total)
                else:
                    self.leaders.Reduce(total, None)
            if self.world.rank == 0:
                self._copy(vector, self._leader)

    def _bcast(self, vector: Tensor) -> None:
        if self.world.rank == 0:
            self._copy(self._leader, vector)
        if self.node.rank == 0 and self.leaders.size > 1:
            self.leaders.Bcast(self._segments[0])
        self._node_barrier()
        if self.world.rank != 0:
            self._copy(vector, self._leader)
        self._node_barrier()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
