"""Aggregations that need what every participant sends until all of them have trained."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..vectors import add_weighted
from .base import Aggregation, Sent
from .grid import GRIDS, Grid, block


class Contributions:
    """What a rank's participants send, a row each, and their numbers: weight, loss, |offset|^2 and the scalars."""

    def __init__(self, names: Sequence[str], size: int, dtype: torch.dtype, device: torch.device):
        self._rows = {name: torch.empty(0, size, dtype=dtype, device=device) for name in names}
        self.clients: list[int] = []
        self.numbers: list[list[float]] = []

    @property
    def bytes_per_client(self) -> int:
        return sum(rows.shape[1] * rows.element_size() for rows in self._rows.values())

    def start(self, count: int) -> None:
        """Forget the last round's; room for ``count`` clients."""
        self.clients, self.numbers = [], []
        for name, rows in self._rows.items():
            if len(rows) < count:
                self._rows[name] = rows.new_empty(0)  # before there are both
                self._rows[name] = rows.new_empty(count, rows.shape[1])

    def rows(self, name: str) -> Tensor:
        return self._rows[name][: len(self.clients)]

    def put(self, name: str, where: slice, sent: Tensor, which: np.ndarray) -> None:
        """The elements ``where`` of the next clients' vectors; in ``sent`` they are the rows ``which``."""
        for target, i in zip(self._rows[name][len(self.clients) :], which, strict=False):
            target[where].copy_(sent[i])

    def add(self, clients: np.ndarray, numbers: np.ndarray) -> None:
        """The clients whose vectors were put, and their numbers, a row for each kind."""
        self.clients += clients.tolist()
        self.numbers += numbers.T.tolist()


class Buffered(Aggregation):
    """Contributions are kept until all have trained; the ranks share a table of all participants' numbers."""

    def _allocate(self) -> None:
        size, device = self.transport.size, self.transport.device
        self.contributions = Contributions(self.algorithm.up, size, self.dtype, device)
        self.columns: dict[int, int] = {}  # in the table, by participant
        self.table = np.zeros((0, 0))

    def begin(self, count: int) -> None:
        super().begin(count)
        self.contributions.start(count)

    def add(self, sent: Sent) -> None:
        for part in sent.parts:
            for name in self.vectors:
                self.contributions.put(name, part.where, part.rows[name], part.which)
        self.contributions.add(sent.clients, np.stack((sent.weights, sent.losses, sent.norms2, *sent.scalars.values())))

    def reduce(self, participants: np.ndarray, communicates: bool) -> None:
        self.share(participants)
        if self.world.rank == 0:  # the others have no part in these totals
            self.loss = float(self.table[1].sum())
            self.norms2 = float((self._weights("offset", self.table[0]) * self.table[2]).sum())
        if communicates and self.included.any():
            self._reduce()
            self.scalars = {
                name: self._scalar(name, values)
                for name, values in zip(self.algorithm.scalars, self.table[3:], strict=True)
            }

    @abstractmethod
    def _reduce(self) -> None:
        """Of all participants' vectors, in the root's ``vectors``."""

    @abstractmethod
    def _scalar(self, name: str, values: np.ndarray) -> float:
        """The same of the participants' numbers."""

    def share(self, participants: np.ndarray) -> None:
        """Every participant's numbers, on all ranks; those of clients that are left out are zero."""
        self.columns = {client: i for i, client in enumerate(participants.tolist())}
        self.table = self._by_participant(self.contributions.numbers, 3 + len(self.algorithm.scalars))

    def _by_participant(self, numbers: Sequence[Sequence[float]], rows: int) -> np.ndarray:
        """Numbers of this rank's clients as columns of a table of all participants, added up over the ranks."""
        table = np.zeros((rows, len(self.columns)))
        for client, column in zip(self.contributions.clients, numbers, strict=True):
            table[:, self.columns[client]] = column
        return self.world.allreduce_sum(table)

    @property
    def included(self) -> np.ndarray:
        return self.table[0] > 0

    @property
    def bytes_per_client(self) -> int:
        return self.contributions.bytes_per_client

    def distances(self, x_previous: Tensor, x: Tensor) -> float:
        if self.is_plain_mean:
            return super().distances(x_previous, x)
        step = x_previous - x
        far, size = [], block(step)
        for row in self.contributions.rows("offset"):
            pieces = zip(row.split(size), step.split(size), strict=True)
            far.append([sum(float((a.double() - b.double()).square_().sum()) for a, b in pieces)])
        weighted = self._weights("offset", self.table[0]) * self._by_participant(far, 1)[0]
        return float(weighted.sum()) if self.world.rank == 0 else 0.0


class WeightedSums(Buffered):
    """Sums of all participants' vectors: plain ones or, with ``--sums exact``, the same on any number of ranks.

    Those are of whole numbers. Every coordinate has a grid of its own, of spacing 2^g, from the largest exponent that
    it has on any rank. Contributions are rounded to whole multiples of it, which are integers; their sums are exact, in
    any order.
    """

    grid: Grid | None

    def _allocate(self) -> None:
        super()._allocate()
        self.grid = GRIDS[self.dtype] if self.config.sums == "exact" else None
        rows, t = len(self.vectors) if self.grid else 0, self.transport
        self.integers = torch.zeros(rows, t.size, dtype=t.dtype, device=t.device)

    def _factors(self, name: str) -> np.ndarray:
        """That the vectors of this rank's clients are multiplied by."""
        return np.ones(len(self.contributions.clients))

    def _scalar(self, name: str, values: np.ndarray) -> float:
        return float((values * self._weights(name, self.table[0])).sum())

    def _reduce(self) -> None:
        own = np.array([row[0] for row in self.contributions.numbers])
        weights = {name: self._weights(name, own) * self._factors(name) for name in self.vectors}
        if self.grid is not None:
            self._reduce_on_grid(self.grid, weights)
            return
        for name, vector in self.vectors.items():
            vector.zero_()
            add_weighted(vector, list(self.contributions.rows(name)), weights[name].tolist())
        self.transport.reduce(list(self.vectors.values()))

    def _reduce_on_grid(self, grid: Grid, weights: dict[str, np.ndarray]) -> None:
        exponents = torch.stack([grid.exponents(self.contributions.rows(name)) for name in self.vectors]).cpu()
        self.world.allreduce_max(exponents.numpy())
        exponents = exponents.to(self.transport.device)
        # A power of two that no sum of weights exceeds, clipped or not.
        totals = [self._weights(name, self.table[0]).sum() for name in self.vectors]
        bits = [max(0, math.ceil(math.log2(total))) for total in totals]
        for i, name in enumerate(self.vectors):
            grid.whole(self.contributions.rows(name), weights[name], exponents[i], bits[i], self.integers[i])
        self.transport.reduce(list(self.integers))
        if self.world.rank == 0:
            for i, vector in enumerate(self.vectors.values()):
                grid.real(self.integers[i], exponents[i], bits[i], vector)

    def bytes_moved(self, participants: int) -> int:
        t = self.transport
        exponents = 2 * t.bytes_per_vector * self.grid.exponent.itemsize // t.dtype.itemsize if self.grid else 0
        return len(self.vectors) * (t.bytes_rounded + exponents)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.integers.nbytes
