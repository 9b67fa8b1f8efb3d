"""Vectors between nodes, in pieces, along a chain of one rank per node, or a tree where that is faster.

Every node passes a piece on as soon as it has it. All links work at the same time, so that a long vector takes about as
long as one copy over one link, and the ranks of a node work on a piece while others are on the wire. Sums are added
from the end of the chain to rank 0: their bits do not depend on the size of the pieces or on the MPI library.

With ``rounded``, pieces are sent in bf16: the sums so far, or in a broadcast the changes (``shared_window.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

PIECE = 1 << 18  # elements
AHEAD = 3  # pieces that a sender may have on the wire


class Relay:
    """Reduces to, and broadcasts from, rank 0 of a communicator that has one rank of every node."""

    def __init__(self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, rounded: bool):
        self.comm, self.rounded = comm, rounded
        self.pieces = pieces(size)
        most = children(comm.size, len(self.pieces))
        first = most * comm.rank + 1
        self.parent = (comm.rank - 1) // most if comm.rank else None
        self.children = list(range(first, min(first + most, comm.size)))
        kind = torch.bfloat16 if rounded else dtype
        length = min(PIECE, size)
        self._arriving = {rank: torch.empty(AHEAD, length, dtype=kind) for rank in self.children}
        self._code = torch.empty(size if rounded else 0, dtype=kind)
        self._expected: dict[int, list[MPI.Request]] = {}
        self._sent: list[MPI.Request] = []

    def begin_reduce(self) -> None:
        """Post the receives of the children's first pieces."""
        for child in self.children:
            self._expected[child] = [self._receive(child, k) for k in range(min(AHEAD, len(self.pieces)))]

    def reduce(self, k: int, total: Tensor) -> None:
        """Add the children's sums to piece ``k`` of ``total``, and send it to the parent."""
        part = self.pieces[k]
        for child in self.children:
            self._expected[child][k].Wait()
            total[part].add_(self._place(child, k))
            if k + AHEAD < len(self.pieces):
                self._expected[child].append(self._receive(child, k + AHEAD))
        if self.parent is not None:
            if self.rounded:
                self._code[part] = total[part]
            self._send((self._code if self.rounded else total)[part], [self.parent])

    def _place(self, child: int, k: int) -> Tensor:
        part = self.pieces[k]
        return self._arriving[child][k % AHEAD][: part.stop - part.start]

    def _receive(self, child: int, k: int) -> MPI.Request:
        return self.comm.Irecv(_buffer(self._place(child, k)), child)

    def bcast(self, k: int, target: Tensor) -> None:
        """Receive piece ``k`` of ``target``, unless this is the root, and send it to the children."""
        if self.parent is not None:
            if k == 0:
                self._expected[self.parent] = []
            expected = self._expected[self.parent]
            for part in self.pieces[len(expected) : k + AHEAD]:
                expected.append(self.comm.Irecv(_buffer(target[part]), self.parent))
            expected[k].Wait()
        self._send(target[self.pieces[k]], self.children)

    def change(self, k: int, target: Tensor, change: Tensor) -> None:
        """Add the root's ``change``, rounded to bf16, to piece ``k`` of ``target``, the root's too."""
        part = self.pieces[k]
        if self.parent is None:
            self._code[part] = change[: part.stop - part.start]
        self.bcast(k, self._code)
        target[part].add_(self._code[part])

    def finish(self) -> None:
        """Wait until all that was sent may be overwritten."""
        MPI.Request.Waitall(self._sent)
        self._sent = []

    def _send(self, piece: Tensor, targets: Sequence[int]) -> None:
        # Pieces that are sent at the same time share the wire, and the first arrives no sooner than the last.
        if len(self._sent) >= AHEAD * len(targets):
            MPI.Request.Waitall(self._sent[: len(targets)])
            del self._sent[: len(targets)]
        self._sent += [self.comm.Isend(_buffer(piece), rank) for rank in targets]


def children(nodes: int, pieces: int) -> int:
    """How many children a node has: 1 in a chain; 2 in a tree, which is less deep but sends every piece twice."""
    return 1 if pieces + nodes - 2 <= 2 * (pieces + math.log2(nodes) - 1) else 2


def pieces(size: int) -> list[slice]:
    return [slice(first, min(first + PIECE, size)) for first in range(0, size, PIECE)]


def _buffer(tensor: Tensor) -> np.ndarray:
    """As MPI takes it, which has no bf16."""
    array: np.ndarray = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
