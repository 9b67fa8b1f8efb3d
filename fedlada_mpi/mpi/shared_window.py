"""Vectors through a shared-memory window: one copy per rank within a node, and one rank per node that sends them on.

A node's ranks each own a segment of the window. The leader is the first of them. To reduce, each rank copies its vector
into its segment, and sums a slice of the coordinates over all segments into the leader's. To broadcast, the leader's
segment is filled once and every rank copies from it. On several nodes both happen in pieces, which the leaders send on
meanwhile (``relay.py``). Device vectors are copied straight to and from the window, whose memory is page-locked.

Every node decides for itself: if it has one rank, or no room for a window, each of its ranks is its own leader.
"""

from __future__ import annotations

import ctypes
import os
from typing import cast

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from .relay import Relay, pieces
from .transport import Transport
from .world import World

BLOCK = 1 << 16  # elements summed at a time: all ranks' blocks stay in the cache
WORTH_IT = 1 << 22  # bytes of a window; for smaller ones MPI's collectives are faster than the window's four barriers
HEADROOM = 1.2  # free space in /dev/shm, in windows


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

    def __init__(
        self, world: World, size: int, dtype: torch.dtype, device: torch.device, rounded: bool = False
    ):  # fmt: skip
        """``rounded``: between nodes, ``reduce`` and ``bcast_change`` send bf16."""
        super().__init__(world, size, dtype, device)
        # ``self.node``: the ranks of this window, which are those of the node, or this one alone.
        alone = not world.all_on_node(worth_it(world, size * dtype.itemsize, least=0))
        self.node = cast(MPI.Intracomm, world.node.Split(world.node.rank if alone else 0, world.node.rank))
        split = world.comm.Split(0 if self.node.rank == 0 else MPI.UNDEFINED, world.rank)
        self.leaders = cast(MPI.Intracomm, split)
        world.communicators += [comm for comm in (self.node, self.leaders) if comm != MPI.COMM_NULL]
        self.nodes = int(world.allreduce_sum(np.array(float(self.node.rank == 0))))
        self.rounds = rounded and self.nodes > 1
        leads = self.node.rank == 0 and self.nodes > 1
        self._relay = Relay(self.leaders, size, dtype, rounded) if leads else None
        self._pieces = pieces(size)
        self._numpy_type = np.dtype(str(dtype).removeprefix("torch."))
        self._window: MPI.Win | None = None
        if alone:
            self._segments = [np.empty(size, self._numpy_type)]
        else:
            self._window = MPI.Win.Allocate_shared(size * dtype.itemsize, dtype.itemsize, comm=self.node)
            self._window.Lock_all()  # MPICH allows Sync only between Lock_all and Unlock_all
            self._segments = [self._segment(self._window, rank) for rank in range(self.node.size)]
        self._mine = torch.from_numpy(self._segments[self.node.rank])
        self._leader = torch.from_numpy(self._segments[0])
        self._mine.zero_()  # memory is placed near the core that first writes to it
        if device.type == "cuda":
            for segment in {0, self.node.rank}:
                array = self._segments[segment]
                torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)

    @property
    def bytes_rounded(self) -> int:
        saved = self.dtype.itemsize - torch.bfloat16.itemsize if self.rounds else 0
        return self.bytes_per_vector - (self.nodes - 1) * self.size * saved

    def close(self) -> None:
        if self.device.type == "cuda":
            for segment in {0, self.node.rank}:
                torch.cuda.cudart().cudaHostUnregister(self._segments[segment].ctypes.data)
        with self.world.wait_limit:
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
        """Wait until all ranks of the window are here; each then sees what the others wrote."""
        self._leave(self._arrive())

    def _arrive(self) -> MPI.Request | None:
        """Start a barrier: what this rank has written, the others may read after they ``_leave`` it."""
        if self._window is None:
            return None
        self._window.Sync()
        return self.node.Ibarrier()

    def _leave(self, barrier: MPI.Request | None) -> None:
        if self._window is not None and barrier is not None:
            self.world.wait_for(barrier)
            self._window.Sync()

    def _reduce(self, vector: Tensor) -> None:
        self._copy(self._mine, vector)
        self._node_barrier()
        if self.nodes == 1:
            self._sum(*self._slice(slice(0, self.size)))
            self._node_barrier()
        else:
            self._reduce_in_pieces()
        if self.world.rank == 0:
            self._copy(vector, self._leader)

    def _reduce_in_pieces(self) -> None:
        """While a piece is between nodes, the node's ranks add up the next one."""
        if self._relay:
            self._relay.begin_reduce()
        summed = []
        for k, part in enumerate(self._pieces):
            self._sum(*self._slice(part))
            summed.append(self._arrive())
            if self._relay and k:
                self._leave(summed[k - 1])
                self._relay.reduce(k - 1, self._leader)
        for request in summed[-1:] if self._relay else summed:
            self._leave(request)
        if self._relay:
            self._relay.reduce(len(summed) - 1, self._leader)
            self._relay.finish()

    def _slice(self, part: slice) -> tuple[int, int]:
        """The bounds of what this rank sums, of a part of the vector."""
        ranks, length = self.node.size, part.stop - part.start
        bounds = [part.start + length * r // ranks // 16 * 16 for r in range(ranks)]
        return bounds[self.node.rank], [*bounds, part.stop][self.node.rank + 1]

    def _sum(self, first: int, last: int) -> None:
        total = self._segments[0]
        for start in range(first, last, BLOCK):
            block = slice(start, min(start + BLOCK, last))
            for segment in self._segments[1:]:
                np.add(total[block], segment[block], out=total[block])

    def _bcast(self, vector: Tensor) -> None:
        if self.nodes == 1:
            if self.world.rank == 0:
                self._copy(self._leader, vector)
            self._node_barrier()
            if self.world.rank != 0:
                self._copy(vector, self._leader)
        else:
            self._bcast_in_pieces(vector)
        self._node_barrier()

    def bcast_change(self, vector: Tensor, before: Tensor) -> None:
        if not self.rounds:
            super().bcast_change(vector, before)
            return
        self._synchronize()
        self._check(vector)
        self.world.bytes_moved += self.bytes_rounded
        with self.world.wait_limit:
            self._bcast_in_pieces(vector, before)
            self._node_barrier()

    def _bcast_in_pieces(self, vector: Tensor, before: Tensor | None = None) -> None:
        """While a piece is between nodes, the node's ranks copy the one before it.

        With ``before``, the change since then is sent, in bf16, and every rank adds it to ``before``, the root too.
        """
        root, relay = self.world.rank == 0, self._relay
        change = torch.empty(len(vector[self._pieces[0]]) if root else 0, dtype=self.dtype, device=self.device)
        # Ranks other than the leader arrive at the barriers of all pieces at once, and wait for each in ``_leave``.
        arrived = [] if relay else [self._arrive() for _ in self._pieces]
        for k, part in enumerate(self._pieces):
            if relay and before is not None:
                self._copy(self._leader[part], before[part])
                if root:
                    torch.sub(vector[part], before[part], out=change[: part.stop - part.start])
                relay.change(k, self._leader, change)
            elif relay:
                if root:
                    self._copy(self._leader[part], vector[part])
                relay.bcast(k, self._leader)
            if relay:
                arrived.append(self._arrive())
            else:
                self._leave(arrived[k])
            if not root or before is not None:
                self._copy(vector[part], self._leader[part])
        if relay:
            for request in arrived:
                self._leave(request)
            relay.finish()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
