"""How many examples clients have, as far as this rank knows: the weights of means, and the steps of a round."""

from __future__ import annotations

import numpy as np

from ..mpi import World
from ..settings import Config
from .batches import local_steps


class Sizes:
    """Known on every rank."""

    def __init__(self, known: np.ndarray):
        self.known = known  # by client

    def mean_steps(self, config: Config, participants: np.ndarray) -> float:
        """K of a round, the mean over its participants."""
        return float(local_steps(config, self.known[participants]).mean())

    def add_up(self, world: World, included: np.ndarray) -> None:
        """Of what only the ranks of the participants know; collective."""

    def weight(self, included: np.ndarray) -> float:
        """On the root, the examples of all these participants."""
        return float(self.known[included].sum())


class OwnSizes(Sizes):
    """Of this rank's clients alone; of the others, the sums that silos have agreed to know."""

    def __init__(self, known: np.ndarray, steps: float):
        """``steps``: the mean over all clients, which stands for that of any round's participants."""
        super().__init__(known)
        self.steps, self.sum = steps, 0.0

    def mean_steps(self, config: Config, participants: np.ndarray) -> float:
        return self.steps

    def add_up(self, world: World, included: np.ndarray) -> None:
        self.sum = float(world.reduce_sum(np.array([self.known[included].sum()]))[0])

    def weight(self, included: np.ndarray) -> float:
        return self.sum
