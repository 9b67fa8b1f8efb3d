"""Bcast and Reduce of flat vectors between ranks: the interface, and the transports that are one MPI call each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from .world import World


class Transport(ABC):
    """Bcast and Reduce of flat vectors of one size, type and device, with buffers that are allocated once.

    ``plan.plan_transport`` chooses one. All methods but the properties are collective.

    >>> import torch
    >>> from fedlada_mpi.mpi import World
    >>> from fedlada_mpi.mpi.plan import plan_transport
    >>> with World() as world:
    ...     transport = plan_transport(world, 3, torch.float64, torch.device("cpu"))
    ...     x = torch.full((3,), world.rank + 1.0, dtype=torch.float64)
    ...     transport.reduce([x])  # on the root, x is now the sum over ranks
    ...     transport.bcast([x])  # and now on every rank
    ...     transport.close()
    >>> x.tolist() == 3 * [sum(rank + 1.0 for rank in range(world.size))]
    True
    """

    kind: ClassVar[str]  # as in --transport
    joins_neighbours: ClassVar[bool] = False  # whether vectors that are adjacent in memory move in one call

    def __init__(self, world: World, size: int, dtype: torch.dtype, device: torch.device):
        self.world, self.size, self.dtype, self.device = world, size, dtype, device
        self.ranks = world.size  # that ``bytes_per_vector`` is for
        self.nodes = 1  # groups of ranks that are summed separately before their sums are added
        self.rounds = False  # whether ``reduce`` and ``bcast_change`` round to bf16 between nodes

    @property
    def bytes_per_vector(self) -> int:
        """Bytes that one vector moves: every rank but the root sends or receives it once."""
        return (self.ranks - 1) * self.size * self.dtype.itemsize

    @property
    def bytes_rounded(self) -> int:
        """The same for ``reduce`` and ``bcast_change``, which ``--wire`` may round."""
        return self.bytes_per_vector

    def bcast(self, vectors: Sequence[Tensor]) -> None:
        """Overwrite every rank's vectors with the root's.

        Callers wait in a barrier first, so that the time of this call is that of the transfer.
        """
        self._synchronize()
        self.world.bytes_moved += len(vectors) * self.bytes_per_vector
        for vector in self._planned(vectors):
            with self.world.wait_limit:
                self._bcast(vector)

    def reduce(self, vectors: Sequence[Tensor]) -> None:
        """Overwrite the root's vectors with the sums over all ranks; the other ranks' vectors do not change."""
        self._synchronize()
        self.world.bytes_moved += len(vectors) * self.bytes_rounded
        for vector in self._planned(vectors):
            with self.world.wait_limit:
                self._reduce(vector)

    def bcast_change(self, vector: Tensor, before: Tensor) -> None:
        """Overwrite every rank's ``vector`` with the root's; ``before``: its last value, the same on all ranks.

        A transport that rounds sends ``vector - before`` in bf16. Then the root's vector, too, becomes ``before`` plus
        the rounded change, and all ranks hold the same bits.
        """
        with self.world.wait_limit:
            self.bcast([vector])

    def close(self) -> None:  # noqa: B027  (most have nothing to free)
        """Free the buffers."""

    @abstractmethod
    def _bcast(self, vector: Tensor) -> None: ...

    @abstractmethod
    def _reduce(self, vector: Tensor) -> None: ...

    def _synchronize(self) -> None:
        """Wait for the GPU's work on the vectors."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _check(self, vector: Tensor) -> None:
        assert vector.shape == (self.size,), f"planned for {self.size} elements, got {tuple(vector.shape)}"
        assert vector.dtype == self.dtype, f"planned for {self.dtype}, got {vector.dtype}"
        assert vector.is_contiguous()

    def _planned(self, vectors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The vectors, checked; those adjacent in memory as one, where the transport can move them so."""
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
    """Vectors in host memory, passed to MPI in place."""

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
        array = vector.numpy()
        # Sums of masked words wrap around, which only unsigned ones do by definition.
        return array.view(np.uint64) if array.dtype == np.int64 else array


class DirectTransport(HostTransport):
    """Vectors in device memory, passed in place to a CUDA-aware MPI."""

    kind = "direct"

    @staticmethod
    def _buffer(vector: Tensor) -> Any:
        return vector
