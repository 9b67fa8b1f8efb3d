"""Device vectors through pinned host memory, in pieces, so that copies overlap the collective."""

from __future__ import annotations

import torch
from mpi4py import MPI
from torch import Tensor

from .transport import Transport
from .world import World


class StagedTransport(Transport):
    """Vectors in device memory, for an MPI that takes only host memory."""

    kind = "staged"
    PIECE = 1 << 22  # elements; 16 MB of float32, enough to hide the copies' start-up

    def __init__(self, world: World, size: int, dtype: torch.dtype, device: torch.device):
        super().__init__(world, size, dtype, device)
        self._pinned = [torch.empty(min(self.PIECE, size), dtype=dtype, pin_memory=True) for _ in range(2)]
        self._stream = torch.cuda.Stream(device)

    def _bcast(self, vector: Tensor) -> None:
        """The root copies piece i+1 to the host while i is sent; the others copy i to the device while i+1 arrives."""
        root, parts = self.world.rank == 0, vector.split(self.PIECE)
        copied: list[torch.cuda.Event | None] = [None, None]
        with torch.cuda.stream(self._stream):
            if root:
                copied[0] = self._copy(self._piece(0, parts[0]), parts[0])
            for i, part in enumerate(parts):
                piece, event = self._piece(i, part), copied[i % 2]
                if event is not None:
                    event.synchronize()
                if root and i + 1 < len(parts):
                    copied[(i + 1) % 2] = self._copy(self._piece(i + 1, parts[i + 1]), parts[i + 1])
                self.world.comm.Bcast(piece.numpy())
                if not root:
                    copied[i % 2] = self._copy(part, piece)
        self._stream.synchronize()

    def _reduce(self, vector: Tensor) -> None:
        """Piece i+1 is copied to the host while piece i is summed; the root copies the sums back to the device."""
        root, parts = self.world.rank == 0, vector.split(self.PIECE)
        with torch.cuda.stream(self._stream):
            copied = self._copy(self._piece(0, parts[0]), parts[0])
            for i, part in enumerate(parts):
                piece = self._piece(i, part)
                copied.synchronize()
                if i + 1 < len(parts):
                    copied = self._copy(self._piece(i + 1, parts[i + 1]), parts[i + 1])
                if root:
                    self.world.comm.Reduce(MPI.IN_PLACE, piece.numpy())
                    self._copy(part, piece)
                else:
                    self.world.comm.Reduce(piece.numpy(), None)
        self._stream.synchronize()

    def _piece(self, i: int, part: Tensor) -> Tensor:
        """Piece ``i``'s pinned buffer, of the two that take turns."""
        return self._pinned[i % 2][: len(part)]

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event
