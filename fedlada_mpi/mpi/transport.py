"""Bcast and Reduce of flat vectors between ranks, planned once with their buffers: the interface, the plain kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from mpi4py import MPI
from torch import Tensor

from .world import World


class Transport(ABC):
    """Bcast and Reduce of flat vectors of one size and type; ``plan.plan_transport`` chooses one."""

    kind: ClassVar[str]  # as in --transport
    joins_neighbours: ClassVar[bool] = False  # vectors that are adjacent in memory travel in one call

    def __init__(self, world: World, size: int, dtype: torch.dtype, device: torch.device):
        self.world, self.size, self.dtype, self.device = world, size, dtype, device
        self.nodes = 1  # whose sums are added up apart, and then with each other
        self.rounds = False  # whether sums and ``bcast_change`` round what crosses between nodes

    @property
    def bytes_per_vector(self) -> int:
        """Bytes between ranks for one vector: each rank but the root sends or receives it once."""
        return (self.world.size - 1) * self.size * self.dtype.itemsize

    @property
    def bytes_rounded(self) -> int:
        """The same for a sum, or for a change that is broadcast, which ``--wire`` may round."""
        return self.bytes_per_vector

    def bcast(self, vectors: Sequence[Tensor]) -> None:
        """The root's vectors, on every rank, in place. Callers pass a barrier first: waiting is timed apart."""
        self._synchronize()
        self.world.bytes_moved += len(vectors) * self.bytes_per_vector
        for vector in self._planned(vectors):
            with self.world.wait_limit:
                self._bcast(vector)

    def reduce(self, vectors: Sequence[Tensor]) -> None:
        """The sum over ranks, in place on the root; the other ranks' vectors keep what they hold."""
        self._synchronize()
        self.world.bytes_moved += len(vectors) * self.bytes_rounded
        for vector in self._planned(vectors):
            with self.world.wait_limit:
                self._reduce(vector)

    def bcast_change(self, vector: Tensor, before: Tensor) -> None:
        """The root's ``vector``, on every rank; ``before`` is what it was on all of them.

        A transport that rounds what crosses between nodes rounds the change, and the root takes the result, too.
        """
        self.bcast([vector])

    def close(self) -> None:  # noqa: B027  (most have nothing to free)
        """Free what the plan holds; collective."""

    @abstractmethod
    def _bcast(self, vector: Tensor) -> None: ...

    @abstractmethod
    def _reduce(self, vector: Tensor) -> None: ...

    def _synchronize(self) -> None:
        """Wait for what the GPU still has to do for the vectors."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check(self, vector: Tensor) -> None:
        assert vector.shape == (self.size,), f"planned for {self.size} elements, got {tuple(vector.shape)}"
        assert vector.dtype == self.dtype, f"planned for {self.dtype}, got {vector.dtype}"
        assert vector.is_contiguous()

    def _planned(self, vectors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The vectors, checked, and joined where they may be."""
        step = self.size * self.dtype.itemsize
        for vector in vectors:
            self._check(vector)
        first = vectors[0]
        same = all(v.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for v in vectors)
        adjacent = same and all(v.data_ptr() == first.data_ptr() + i * step for i, v in enumerate(vectors))
        if adjacent and self.joins_neighbours:
            return [first.as_strided((len(vectors) * self.size,), (1,))]
        return vectors


class SingleRank(Transport):
    """One rank: nothing moves."""

    kind = "none"

    def bcast(self, vectors: Sequence[Tensor]) -> None:
        pass

    def reduce(self, vectors: Sequence[Tensor]) -> None:
        pass

    def _bcast(self, vector: Tensor) -> None:
        pass

    def _reduce(self, vector: Tensor) -> None:
        pass


class HostTransport(Transport):
    """Vectors in host memory, given to the library as they are."""

    kind = "host"
    joins_neighbours = True

    def _bcast(self, vector: Tensor) -> None:
        self.world.comm.Bcast(self._buffer(vector))

    def _reduce(self, vector: Tensor) -> None:
        if self.world.rank == 0:
            self.world.comm.Reduce(MPI.IN_PLACE, self._buffer(vector))
        else:
            self.world.comm.Reduce(self._buffer(vector), None)

    @staticmethod
    def _buffer(vector: Tensor) -> Any:
        return vector.numpy()


class DirectTransport(HostTransport):
    """Device vectors, given as they are to a CUDA-aware library."""

    kind = "direct"

    @staticmethod
    def _buffer(vector: Tensor) -> Any:
        return vector
