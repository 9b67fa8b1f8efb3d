"""What the rounds of a run take, from a few that were timed.

Who trains in which round is known before a run begins, and so is the work of its slowest rank. A round's seconds are

    fixed + per_step * steps + per_client_step * client_steps

``steps`` are those of the rank's stacks of clients, ``client_steps`` those of all its clients: on a CPU they cost about
the same one by one, on a GPU a wider stack costs little more. The three numbers are fitted to rounds that were timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...rounds.batches import local_steps
from ...rounds.costs import MOST_ROUNDS, stack_width
from ...rounds.trainer import chunks
from ...settings import Config
from ...support import rng


@dataclass(frozen=True, order=True)
class Work:
    """Of a rank in a round."""

    client_steps: int = 0  # of all its participants together
    steps: int = 0  # of its stacks, one after the other


class PlannedRounds:
    """The rounds of a run, as far as they are known before it; of one with very many the first stand for the others."""

    def __init__(self, config: Config, sizes: np.ndarray, rank_of: np.ndarray, limit: int = 0):
        """``sizes``: examples of every client; ``rank_of``: its rank, -1 for none; ``limit``: clients at once (0: any
        number)."""
        self.config, self.rank_of, self.limit = config, rank_of, limit
        self.steps, self.width = local_steps(config, sizes), stack_width(config)
        self.count = min(config.rounds, MOST_ROUNDS)

    def participants(self, t: int) -> np.ndarray:
        c = self.config
        drawn = rng.participants(c.clients, c.participation, c.sampling, c.seed, t)
        return drawn[self.rank_of[drawn] >= 0]

    def work(self, t: int, cut: int = 0) -> Work:
        """Of the slowest rank; ``cut``: all clients take so many steps instead of their own."""
        mine = self._slowest(t, cut)
        stacks = [mine[rows] for rows in self._stacks(mine)]
        padded = sum(max(0, self.width - len(stack)) * int(stack.max()) for stack in stacks)
        return Work(int(mine.sum()) + padded, sum(int(stack.max()) for stack in stacks))

    def running(self, t: int, cut: int = 0) -> set[int]:
        """How many clients of the slowest rank train together; they leave after their own steps."""
        mine = self._slowest(t, cut)
        return {count for rows in self._stacks(mine) for count in self._counts(mine[rows])}

    def _slowest(self, t: int, cut: int) -> np.ndarray:
        """The steps of the participants of the rank that has most of them."""
        clients = self.participants(t)
        steps = np.full(len(clients), cut) if cut else self.steps[clients]
        ranks = self.rank_of[clients]
        return steps[ranks == np.bincount(ranks, steps).argmax()] if len(clients) else steps

    def _counts(self, steps: np.ndarray) -> set[int]:
        """Of the clients in a stack, those that are still running."""
        return {max(self.width, len(steps)), *(int((steps >= n).sum()) for n in np.unique(steps)[1:])}

    def _stacks(self, steps: np.ndarray) -> Iterable[np.ndarray]:
        """Rows of those that train together."""
        return chunks(np.arange(len(steps)), steps, self.limit, alike=self.width > 0)

    def works(self) -> list[Work]:
        return [self.work(t) for t in range(self.count)]

    def captures(self) -> int:
        """How many graphs a rank captures: one for every number of clients that train together, and all of them again
        where more train at once than ever before. Of the rank that captures most."""
        ranks = int(self.rank_of.max()) + 1
        known: list[set[int]] = [set() for _ in range(ranks)]
        most, captured = [0] * ranks, [0] * ranks
        for t in range(self.count):
            clients = self.participants(t)
            for rank in np.unique(self.rank_of[clients]).tolist():
                steps = self.steps[clients[self.rank_of[clients] == rank]]
                for rows in self._stacks(steps):
                    running = self._counts(steps[rows])
                    if max(running) > most[rank]:
                        most[rank], known[rank] = max(running), set()
                    captured[rank] += len(running - known[rank])
                    known[rank] |= running
        return max(captured)


def samples(works: Sequence[Work]) -> list[int]:
    """The rounds with most, with median and with least work, as far as they differ; most first."""
    order = sorted((t for t, work in enumerate(works) if work.steps), key=lambda t: works[t], reverse=True)
    chosen = [order[0], order[len(order) // 2], order[-1]] if order else []
    return list({works[t]: t for t in reversed(chosen)}.values())[::-1]


@dataclass(frozen=True)
class Fit:
    """The seconds of a round by its work."""

    fixed: float
    per_step: float
    per_client_step: float

    @classmethod
    def of(cls, timed: Sequence[tuple[Work, float]]) -> Fit:
        """By least squares of the relative errors, with no negative number."""
        rows = np.array([[1.0, work.steps, work.client_steps] for work, _ in timed])
        seconds = np.array([max(value, 1e-9) for _, value in timed])
        numbers, used = np.zeros(3), [0, 1, 2]
        while used:
            found = np.linalg.lstsq(rows[:, used] / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]
            if (found >= 0).all():
                numbers[used] = found
                break
            del used[int(found.argmin())]
        return cls(*numbers.tolist())

    def seconds(self, work: Work) -> float:
        return self.fixed + self.per_step * work.steps + self.per_client_step * work.client_steps
