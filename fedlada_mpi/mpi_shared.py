"""The transport's shared-memory window: one copy per rank within a node, `Reduce`/`Bcast` between nodes only.

A node's ranks each own a segment of the window. To reduce, each copies its vector in, sums its own slice over
all segments into the leader's, and the leaders add up between nodes. To broadcast, the leader's segment is
filled once and every rank copies from it. Device vectors are copied straight to and from the window, whose
memory is page-locked.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

BLOCK = 1 << 16  # elements summed at a time: all ranks' blocks stay in the cache
WORTH_IT = 1 << 22  # bytes of a window; below, the library's own collectives are quicker than meeting four times


def worth_it(world, bytes_per_vector: int) -> bool:
    return world.node.size > 1 and world.node.size * bytes_per_vector >= WORTH_IT


def fits(world, bytes_per_vector: int) -> bool:
    """Whether /dev/shm has room for this node's window, with some to spare."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return False
    return stat.f_bavail * stat.f_frsize > 1.2 * world.node.size * bytes_per_vector


class Window:
    def __init__(self, world, size: int, dtype: torch.dtype, device: torch.device):
        self.world, self.node, self.device = world, world.node, device
        leader = self.node.rank == 0
        self.leaders = world.comm.Split(0 if leader else MPI.UNDEFINED, world.rank)
        self.numpy_type = np.dtype(str(dtype).removeprefix("torch."))
        self.window = MPI.Win.Allocate_shared(size * dtype.itemsize, dtype.itemsize, comm=self.node)
        self.window.Lock_all()  # MPICH takes Sync only between locks
        self.segments = [self._segment(rank, size) for rank in range(self.node.size)]
        self.mine = torch.from_numpy(self.segments[self.node.rank])
        self.leader = torch.from_numpy(self.segments[0])
        bounds = np.linspace(0, size, self.node.size + 1).astype(int) // 16 * 16
        bounds[-1] = size
        self.slice = (int(bounds[self.node.rank]), int(bounds[self.node.rank + 1]))
        self.mine.zero_()  # first touch by its owner, so that the pages lie near it
        if device.type == "cuda":
            for segment in {0, self.node.rank}:
                array = self.segments[segment]
                torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)

    def close(self) -> None:
        if self.device.type == "cuda":
            for segment in {0, self.node.rank}:
                torch.cuda.cudart().cudaHostUnregister(self.segments[segment].ctypes.data)
        self.window.Unlock_all()
        self.window.Free()

    def _segment(self, rank: int, size: int) -> np.ndarray:
        memory, _ = self.window.Shared_query(rank)
        kind = ctypes.c_char * (size * self.numpy_type.itemsize)
        return np.frombuffer(kind.from_address(memory.address), self.numpy_type)

    def _meet(self) -> None:
        """All of the node's ranks are here, and see what the others wrote."""
        self.window.Sync()
        self.world._poll(self.node.Ibarrier())
        self.window.Sync()

    def reduce(self, vector: Tensor) -> None:
        self._copy(self.mine, vector)
        self._meet()
        low, high = self.slice
        total = self.segments[0]
        for start in range(low, high, BLOCK):
            part = slice(start, min(start + BLOCK, high))
            for segment in self.segments[1:]:
                np.add(total[part], segment[part], out=total[part])
        self._meet()
        if self.node.rank == 0:
            if self.leaders.size > 1:
                if self.world.rank == 0:
                    self.leaders.Reduce(MPI.IN_PLACE, total)
                else:
                    self.leaders.Reduce(total, None)
            if self.world.rank == 0:
                self._copy(vector, self.leader)

    def bcast(self, vector: Tensor) -> None:
        if self.world.rank == 0:
            self._copy(self.leader, vector)
        if self.node.rank == 0 and self.leaders.size > 1:
            self.leaders.Bcast(self.segments[0])
        self._meet()
        if self.world.rank != 0:
            self._copy(vector, self.leader)
        self._meet()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
