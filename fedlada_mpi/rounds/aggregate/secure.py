"""Sums of which the root learns nothing else (``--secure``): whole numbers on a public grid, masked by every silo.

A message has a row of words for every vector that the method sends; the last row ends with the numbers of the round. A
rank adds its clients' values up as they finish, on top of its masks, which cancel in the sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...algorithms import Algorithm, Round, Vectors
from ...mpi import World
from ...mpi.plan import plan_transport
from ...mpi.transport import Transport
from ...privacy.grid import LARGEST, WORDS, NumberGrid, PublicGrid
from ...privacy.masks import Masks
from ...settings import Config
from ...settings.privacy import FEWEST_SILOS
from ...support.errors import DivergedError, PublicError
from ...support.rng import fixed_number
from ...support.words import joined, split
from .base import Aggregation, Sent, Totals

NUMBERS = 2.0**20  # a large loss, squared norm or scalar of a client; larger ones are rounded as finely
EVALUATED = 2.0**32  # the same of a sum over a client's examples
CHANGES = 8  # the range of what is sent as a change is so many times smaller
# What is counted, in whole numbers, before the losses, squared norms and scalars.
COUNTED = ("check", "participants", "left_out", "weight", "steps", "out_of_range")
MEASURED = ("loss", "norms2")


@dataclass(frozen=True)
class Secure:
    """What masked sums need of a run."""

    masks: Masks
    s: Vectors  # of the server, on this rank
    largest_weight: float  # that the participants of a round may have together
    begun: Callable[[int], None] = lambda number: None  # called before anything of round ``number`` leaves the rank


class SecureSums(Aggregation):
    conceals = True

    def __init__(
        self,
        world: World,
        config: Config,
        algorithm: Algorithm,
        transport: Transport,
        dtype: torch.dtype,
        secure: Secure,
    ):  # fmt: skip
        self.secure, self.masks = secure, secure.masks
        self.numbers: dict[str, NumberGrid] = {}
        for name in (*MEASURED, *algorithm.scalars):
            self.numbers[name] = NumberGrid(NUMBERS, self._largest_weight(config, algorithm, name))
        vectors = {name: self._grid(config, algorithm, name) for name in algorithm.up}
        self.grids: dict[str, PublicGrid] = vectors | {name: self.numbers[name] for name in algorithm.scalars}
        self.permit: Callable[[Round, np.ndarray], None] = lambda r, participants: None  # may refuse a round
        self.evaluated = NumberGrid(EVALUATED, config.clients)
        # Added to a vector or number that is sent, in units of its grid; by default nothing.
        self.noise: Callable[[str, int], Tensor] | None = None
        super().__init__(world, config, algorithm, transport, dtype)

    def _grid(self, config: Config, algorithm: Algorithm, name: str) -> PublicGrid:
        limit = config.secure_range / (CHANGES if name in algorithm.change_of else 1)
        return PublicGrid(limit, self._largest_weight(config, algorithm, name))

    def _largest_weight(self, config: Config, algorithm: Algorithm, name: str) -> float:
        return most_participants(config) if name in algorithm.uniform else self.secure.largest_weight

    def _allocate(self) -> None:
        names, t = (*COUNTED, *self.numbers), self.transport
        self.names = names
        # Where the words of each begin in the tail.
        sizes = [WORDS if name in self.numbers else 1 for name in names]
        self.places = dict(zip(names, accumulate(sizes, initial=0), strict=False))
        self.wire = plan_transport(self.world, t.size + sum(sizes), torch.int64, t.device, self.config.transport)
        self.world.at_close.callback(self.wire.close)
        self.rows = torch.zeros(len(self.vectors), self.wire.size, dtype=torch.int64, device=t.device)
        self.counts = dict.fromkeys(names, 0)
        self.silos_counted = 0  # by the check word
        self.round: Round | None = None
        self.is_first = True  # of the epoch

    def prepare(self, r: Round, participants: np.ndarray) -> None:
        self.permit(r, participants)
        self.round = r
        # What is derived of these later, is derived of what was received; before the first round it was sent.
        names = (*self.algorithm.down, *(self.algorithm.derived if self.is_first else ()))
        self.is_first = False
        self.masks.start("round", r.t + 1, self.rows, [getattr(self.secure.s, name) for name in names])

    def begin(self, count: int) -> None:
        super().begin(count)
        self.counts = dict.fromkeys(self.names, 0)
        self.counts["left_out"] = count  # until they send

    def add(self, sent: Sent) -> None:
        self.masks.ready()
        counts, weights = self.counts, sent.weights
        counts["participants"] += len(sent.clients)
        counts["left_out"] -= len(sent.clients)
        counts["weight"] += round(float(weights.sum()))
        counts["steps"] += int(sent.steps.sum())
        self._measure("loss", sent.losses, np.ones_like(weights))
        self._measure("norms2", sent.norms2, self._weights("offset", weights))
        for name, values in sent.scalars.items():
            self._measure(name, values, self._weights(name, weights))
        for part in sent.parts:
            for row, name in zip(self.rows[:, : self.transport.size], self.vectors, strict=True):
                base = self._base(name)
                at = None if base is None else base[part.where]
                for i, weight in zip(part.which, self._weights(name, weights), strict=True):
                    vector = part.rows[name][i]
                    counts["out_of_range"] += self.grids[name].add(row[part.where], vector, float(weight), at)

    def _measure(self, name: str, values: np.ndarray, weights: np.ndarray) -> None:
        self.counts[name] += self.numbers[name].whole(np.clip(values, -LARGEST, LARGEST), weights)
        self.counts["out_of_range"] += int((np.abs(values) > LARGEST).sum())

    def _base(self, name: str) -> Tensor | None:
        """What the vector is sent as a change of."""
        base = self.algorithm.change_of.get(name)
        return None if base is None else getattr(self.secure.s, base)

    def reduce(self, participants: np.ndarray, communicates: bool) -> None:
        assert self.round is not None
        number = self.round.t + 1
        self.masks.ready()
        self.counts["check"] = int(bool(self.masks.epoch.own))
        tail = torch.tensor(self._tail(), dtype=torch.int64, device=self.rows.device)
        self._add_noise(tail)
        self.world.collectively(lambda: self.secure.begun(number))
        self._refuse_few(number)
        if communicates:
            self.rows[-1, self.transport.size :] += tail
            self.wire.reduce(list(self.rows))
            words = self.rows[-1, self.transport.size :].cpu().numpy()
        else:  # the same numbers alone, with masks of their own
            words = self.masked_sum(tail.cpu().numpy())
        self._decode(words, communicates)
        self.world.on_root(self._check)

    def _refuse_few(self, number: int) -> None:
        """End the run where so few silos have a finite result that the sum would show theirs; collective."""
        if not self.masks.epoch.degree or self.config.dp != "none":  # with which sums have noise
            return
        words = np.array([int(self.counts["participants"] > 0)], np.int64)
        self.masks.words(words)
        silos = self.world.broadcast_json({"silos": int(self.world.reduce_words(words)[0])})["silos"]
        if 0 < silos < FEWEST_SILOS:
            raise DivergedError(
                f"round {number}: only {silos} silo{'s have' * (silos > 1) or ' has'} results that are finite, which "
                f"a sum of fewer than {FEWEST_SILOS} would show: lower --lr, or set --clip"
            )

    def _tail(self) -> list[int]:
        """The words of all that is counted and measured."""
        parts = [split(n, WORDS) if name in self.numbers else [n] for name, n in self.counts.items()]
        return list(chain.from_iterable(parts))

    def _add_noise(self, tail: Tensor) -> None:
        if self.noise is None:
            return
        for row, name in zip(self.rows[:, : self.transport.size], self.vectors, strict=True):
            row += self.noise(name, self.transport.size)
        for name in self.algorithm.scalars:
            tail[self.places[name]] += self.noise(name, 1)[0]

    def _decode(self, words: np.ndarray, communicates: bool) -> None:
        """On the root, what the sums stand for; the others have no part in these totals."""
        self.loss = self.norms2 = 0.0
        self.scalars = dict.fromkeys(self.scalars, 0.0)
        if self.world.rank:
            return
        counted: dict[str, Any] = {name: int(words[self.places[name]]) for name in COUNTED}
        self.silos_counted = counted.pop("check")
        self.totals = Totals(**{**counted, "weight": float(counted["weight"])})
        measured = {
            name: grid.real(joined(words[self.places[name] :][:WORDS].tolist())) for name, grid in self.numbers.items()
        }
        self.loss, self.norms2 = (measured[name] for name in MEASURED)
        self.scalars = {name: measured[name] for name in self.scalars}
        if communicates:
            for row, (name, vector) in zip(self.rows, self.vectors.items(), strict=True):
                self.grids[name].decode(row[: self.transport.size], vector)

    def _check(self) -> None:
        if self.silos_counted != len(self.masks.epoch.silos):
            raise PublicError(
                "the masks of the silos do not cancel: some have received other vectors than the rest, or have sent "
                "their sums without masks; nothing was learned from this round, --resume repeats it"
            )

    def means(self, weight: float, participants: float) -> dict[str, Tensor]:
        means = super().means(weight, participants)
        for name in self.algorithm.change_of:
            if (base := self._base(name)) is not None:
                means[name].add_(base).clamp_(min=0)  # what rounding may have left below zero
        return means

    def masked_sum(self, words: np.ndarray) -> np.ndarray:
        """The sum of the silos' int64 words, on the root; collective."""
        self.masks.words(words, [self.secure.s.x])
        return self.world.reduce_words(words)

    def client_sums(self, table: np.ndarray) -> np.ndarray:
        """The sums of the rows over all ranks' columns, one for each client, on the root; NaN where one is not finite.

        Collective; zero on the other ranks.
        """
        finite = np.abs(table) <= LARGEST
        parts = [split(self.evaluated.whole(row), WORDS) for row in np.where(finite, table, 0.0)]
        own = [[*words, int(undefined)] for words, undefined in zip(parts, (~finite).sum(1), strict=True)]
        total = self.masked_sum(np.array(own, np.int64).flatten())
        if self.world.rank:
            return np.zeros(len(table))
        sums = total.reshape(len(table), WORDS + 1).tolist()
        return np.array([np.nan if undefined else self.evaluated.real(joined(words)) for *words, undefined in sums])

    def bytes_moved(self, participants: int) -> int:
        return len(self.vectors) * self.wire.bytes_per_vector

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.rows.nbytes


def most_participants(config: Config) -> int:
    """That a round may have, by settings that all know."""
    return fixed_number(config.clients, config.participation) if config.sampling == "fixed" else config.clients
