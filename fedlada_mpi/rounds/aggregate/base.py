"""What an aggregation is: from what the participants send to the means that the server's step takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...algorithms import Algorithm, Round
from ...mpi import World
from ...mpi.transport import Transport
from ...settings import Config
from ..vectors import named_rows


class Part(NamedTuple):
    """A part of what clients send: the elements ``where`` of every vector."""

    where: slice
    rows: dict[str, Tensor]
    which: np.ndarray  # the row of each client
    shared: bool  # whether there is one row, the same for all clients


@dataclass(frozen=True)
class Sent:
    """What clients send when they have finished: vectors in parts, and a number of each kind for every client."""

    clients: np.ndarray
    weights: np.ndarray
    losses: np.ndarray
    norms2: np.ndarray  # ||offset_i||^2
    scalars: dict[str, np.ndarray]
    parts: list[Part]
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # K_i


@dataclass(frozen=True)
class Totals:
    """Of a round whose participants the root does not know one by one."""

    participants: int  # whose result is finite
    left_out: int  # the others
    weight: float
    steps: int
    out_of_range: int  # coordinates


class Collector(ABC):
    """Takes what the clients of a rank send."""

    def __init__(self, algorithm: Algorithm, size: int, dtype: torch.dtype, device: torch.device):
        self.algorithm, self.dtype = algorithm, dtype
        self.vectors = named_rows(algorithm.up, size, dtype, device)
        self._clear()

    def _clear(self) -> None:
        # Of this rank: mean local losses, and ||offset_i||^2 with the weights of the offsets.
        self.loss = self.norms2 = 0.0
        self.scalars = dict.fromkeys(self.algorithm.scalars, 0.0)

    def begin(self, count: int) -> None:
        """Forget the last round; this rank has ``count`` participants."""
        self._clear()

    @abstractmethod
    def add(self, sent: Sent) -> None:
        """Take what clients of this rank send."""

    def _weights(self, name: str, weights: np.ndarray) -> np.ndarray:
        """Of what clients with these ``weights`` send as ``name``; zero for those that are left out."""
        return (weights > 0).astype(float) if name in self.algorithm.uniform else weights


class Aggregation(Collector):
    """The means over a round's participants, on all ranks together.

    >>> aggregation.begin(count=3)             # on every rank, with the number of its participants
    >>> aggregation.add(sent)                  # as clients finish, in any number of turns
    >>> aggregation.reduce(participants, True) # on all ranks together
    >>> aggregation.means(weight, participants=10)["offset"]    # on the root
    """

    # Whether the mean is the weighted one, so that distances to it follow from the clients' norms.
    is_plain_mean: ClassVar[bool] = True
    # Whether losses and norms of the participants may be known outside of their rank.
    discloses: ClassVar[bool] = True
    # Whether ranks send nothing of single participants: then the root has ``totals`` after ``reduce``.
    conceals: ClassVar[bool] = False
    totals = Totals(0, 0, 0.0, 0, 0)

    def __init__(
        self, world: World, config: Config, algorithm: Algorithm, transport: Transport, dtype: torch.dtype
    ):  # fmt: skip
        super().__init__(algorithm, transport.size, dtype, transport.device)
        self.world, self.config, self.transport = world, config, transport
        self._allocate()

    def _allocate(self) -> None:
        """What else a kind of aggregation holds."""

    def prepare(self, r: Round, participants: np.ndarray) -> None:
        """Before the clients of a round train."""

    @abstractmethod
    def reduce(self, participants: np.ndarray, communicates: bool) -> None:
        """From all ranks to the root's ``vectors``; without them where a round does not communicate. Collective."""

    def means(self, weight: float, participants: float) -> dict[str, Tensor]:
        """On the root, from sums with total ``weight``, or the number of ``participants`` where weights are equal."""
        equal = self.algorithm.uniform
        totals = {name: float(participants) if name in equal else weight for name in (*self.vectors, *self.scalars)}
        means = {name: total.div_(totals[name]) for name, total in self.vectors.items()}
        numbers = {name: total / totals[name] for name, total in self.scalars.items()}
        return means | {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    def distances(self, x_previous: Tensor, x: Tensor) -> float:
        """The sum of ||offset_i||^2; where ``is_plain_mean`` is false, of ||offset_i - (x_previous - x)||^2.

        With the weights of the offsets, of this rank's participants, or on the root of all. Collective.
        """
        return self.norms2

    @abstractmethod
    def bytes_moved(self, participants: int) -> int:
        """By the ranks of a round with so many participants."""

    @property
    def nbytes(self) -> int:
        """Memory on this rank's device."""
        return sum(vector.nbytes for vector in self.vectors.values())

    @property
    def bytes_per_client(self) -> int:
        """Memory that it takes in addition for each participant of this rank."""
        return 0

    @property
    def order(self) -> dict[str, Any]:
        """What the last bits of a round depend on: the order of the sums over ranks, or the clients in a stack."""
        if self.config.sums == "exact":
            return {"max_clients_at_once": self.config.max_clients_at_once}
        by_file = self.config.silo_per_rank and self.world.size > 1
        ranks = {"ranks": self.world.size, "transport": self.transport.kind, "silo_per_rank": by_file}
        return {**ranks, "nodes": self.transport.nodes}
