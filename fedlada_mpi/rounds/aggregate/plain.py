"""Sums as they are usually made: on every rank as its clients finish, then over the ranks by ``Reduce``."""

from __future__ import annotations

import numpy as np

from ..vectors import add_weighted
from .base import Aggregation, Collector, Sent


class RankSums(Collector):
    """The sums of one rank."""

    def begin(self, count: int) -> None:
        super().begin(count)
        for vector in self.vectors.values():
            vector.zero_()

    def add(self, sent: Sent) -> None:
        self.loss += float(sent.losses.sum())
        self.norms2 += float((sent.norms2 * self._weights("offset", sent.weights)).sum())
        for part in sent.parts:
            for name, total in self.vectors.items():
                weights = self._weights(name, sent.weights)
                if part.shared:
                    weights = weights.sum(keepdims=True)
                rows = [part.rows[name][row] for row in ([0] if part.shared else part.which)]
                add_weighted(total[part.where], rows, weights.tolist())
        for name, values in sent.scalars.items():
            self.scalars[name] += float((values * self._weights(name, sent.weights)).sum())


class PlainSums(RankSums, Aggregation):
    def reduce(self, participants: np.ndarray, communicates: bool) -> None:
        if not communicates:
            return
        self.transport.reduce(list(self.vectors.values()))
        if self.scalars:
            by_rank = self.world.gather(list(self.scalars.values()))
            self.scalars = dict(zip(self.scalars, by_rank.sum(0).tolist(), strict=True))

    def bytes_moved(self, participants: int) -> int:
        return len(self.vectors) * self.transport.bytes_rounded
