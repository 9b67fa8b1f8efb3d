"""What rounds cost: participants, the bytes that travel, the clients that train at once, and the memory they take.

Metrics and banner take their figures from here, and the summary and reports from the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..algorithms import Algorithm
from ..settings import Config
from ..support import rng


def bytes_of(algorithm: Algorithm, vector_bytes: int, received: int, sent: int) -> tuple[int, int]:
    """Bytes down to ``received`` participants and up from ``sent`` of them, for vectors of the model's length.

    Derived vectors do not travel: whoever receives x computes them.
    """
    return received * len(algorithm.down) * vector_bytes, sent * len(algorithm.up) * vector_bytes


def chunk_count(clients: int, limit: int) -> int:
    """In how many turns ``clients`` train, at most ``limit`` (0: any number) at once."""
    return -(-clients // limit) if limit else min(clients, 1)


def trains_alone(config: Config) -> bool:
    """Whether the bits of a client's result must not depend on who else trains: under ``--sums exact``, on which rank;
    under ``--dp``, who takes part, as all others would betray it."""
    return config.sums == "exact" or config.dp != "none"


def stack_width(config: Config) -> int:
    """How many rows every stack of clients has; 0: as many as there are clients in it.

    The bits of a product depend on how many others are computed with it, not on which: where it matters, all stacks
    have one width, and those with fewer clients are padded.
    """
    return config.max_clients_at_once if trains_alone(config) else 0


MOST_ROUNDS = 5000  # that are drawn in advance, which takes a third of a second


def most_participants(config: Config, rank_of: np.ndarray, start: int) -> np.ndarray:
    """The most participants that each rank has in a round after ``start``; ``rank_of`` has the rank of every client.

    Of a run with very many rounds it is the most that a rank could have, as drawing them all would delay its start.
    """
    clients = np.bincount(rank_of)
    bound = np.minimum(clients, _number(config)) if config.sampling == "fixed" else clients
    if config.rounds - start > MOST_ROUNDS or config.dp != "none":
        return bound
    most = np.zeros_like(clients)
    for t in range(start, config.rounds):
        chosen = rng.participants(config.clients, config.participation, config.sampling, config.seed, t)
        np.maximum(most, np.bincount(rank_of[chosen], minlength=len(clients)), out=most)
        if (most == bound).all():
            break
    return most


def _number(config: Config) -> int:
    return rng.fixed_number(config.clients, config.participation)


@dataclass(frozen=True)
class RankMemory:
    """What a rank reports of its memory."""

    per_client: int  # bytes that a client takes while it trains
    resident: int  # bytes that do not depend on the number of clients that train at once
    clients_that_fit: int  # 0: no limit known
    kept: int = 0  # bytes of what each participant sends, where that is kept until all have trained


@dataclass(frozen=True)
class Costs:
    """The figures of a run, as its banner shows them."""

    participants: int  # in a round; with Bernoulli sampling the mean number, rounded
    bytes_down: int
    bytes_up: int
    bytes_mpi: int
    most_participants: int  # that one rank has in a round
    clients_at_once: int  # the most that train at once on one rank
    clients_that_fit: int  # on the rank where fewest do; 0: no limit known
    memory: int  # of the rank that needs most, in bytes

    @classmethod
    def of(
        cls,
        config: Config,
        algorithm: Algorithm,
        vector_bytes: int,
        bytes_mpi: int,
        rank_of: np.ndarray,
        start: int,
        ranks: Sequence[RankMemory],
    ) -> Costs:
        number = _number(config)
        most = most_participants(config, rank_of, start).tolist()
        most += [0] * (len(ranks) - len(most))
        at_once = []
        for count, rank in zip(most, ranks, strict=True):
            turns = chunk_count(count, config.max_clients_at_once or rank.clients_that_fit)
            at_once.append((stack_width(config) or -(-count // turns)) if turns else 0)
        needed = [
            rank.resident + count * rank.per_client + participants * rank.kept
            for count, participants, rank in zip(at_once, most, ranks, strict=True)
        ]
        down, up = bytes_of(algorithm, vector_bytes, number, number)
        fit = min((rank.clients_that_fit for rank in ranks if rank.clients_that_fit), default=0)
        return cls(number, down, up, bytes_mpi, max(most), max(at_once), fit, max(needed))
