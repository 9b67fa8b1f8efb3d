"""Robust means: of clipped contributions, or coordinate by coordinate.

clip     v_i * min(1, median_j |v_j| / |v_i|), then sums
median, trimmed    coordinate by coordinate; every rank computes a slice (mpi/slices.py)
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from ...mpi.slices import over_participants
from ...settings import trimmed
from ..vectors import norm
from .buffered import Buffered, WeightedSums


class ClippedSums(WeightedSums):
    """Sums of contributions that are no longer than the median one; exact or plain ones, as ``--sums`` says."""

    is_plain_mean = False

    def _factors(self, name: str) -> np.ndarray:
        norms = [[float(norm(row))] for row in self.contributions.rows(name)]
        factors = self._clip(self._by_participant(norms, 1)[0])
        return factors[[self.columns[client] for client in self.contributions.clients]]

    def _scalar(self, name: str, values: np.ndarray) -> float:
        return float((values * self._weights(name, self.table[0]) * self._clip(np.abs(values))).sum())

    def _clip(self, norms: np.ndarray) -> np.ndarray:
        """The factors that clip the participants' norms to their median."""
        median = np.median(norms[self.included])
        return np.divide(median, norms, out=np.ones_like(norms), where=norms > median)


class CoordinateMean(Buffered):
    """Means of what is in the middle, in every coordinate; each participant counts alike."""

    is_plain_mean = False

    @abstractmethod
    def _cut(self, count: int) -> int:
        """How many of ``count`` participants are left out at each end."""

    def _center(self, values: Tensor) -> Tensor:
        return mean_of_middle(values, self._cut(int(self.included.sum())))

    def _reduce(self) -> None:
        counts = np.zeros(self.world.size)
        counts[self.world.rank] = len(self.contributions.clients)
        everywhere = self.world.allreduce_sum(counts).astype(int).tolist()
        for name, vector in self.vectors.items():
            over_participants(self.world, self.contributions.rows(name), everywhere, self._center, vector)

    def _scalar(self, name: str, values: np.ndarray) -> float:
        return float(self._center(torch.from_numpy(values[self.included])[:, None]))

    def means(self, weight: float, participants: float) -> dict[str, Tensor]:
        return super().means(1.0, 1)

    def bytes_moved(self, participants: int) -> int:
        return len(self.vectors) * (participants + 1) * self.transport.bytes_per_vector // self.transport.ranks


class Median(CoordinateMean):
    def _cut(self, count: int) -> int:
        return (count - 1) // 2


class TrimmedMean(CoordinateMean):
    def _cut(self, count: int) -> int:
        return trimmed(self.config.trim, count)


def mean_of_middle(values: Tensor, cut: int) -> Tensor:
    """Of the rows of ``values``, without the ``cut`` smallest and largest in each column."""
    # In columns on a CPU, numpy sorts three times as fast.
    ordered = values.sort(dim=0).values if values.is_cuda else torch.from_numpy(np.sort(values.numpy(), axis=0))
    ordered = ordered[cut : len(values) - cut]
    total = ordered[0].double()
    for row in ordered[1:]:  # one by one: the order in which torch adds up depends on the shape
        total += row
    return (total / len(ordered)).to(values.dtype)
