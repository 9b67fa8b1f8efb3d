"""What every rank holds of the last round that all have done, so that the others can go on when a rank is lost.

    held = Held(silo, start, past)      after the ranks have shared the vectors of round ``start``
    held.take(done)                     with the server's next order: round ``done`` is complete
    held.back_to(t)                     on the ranks that are left, once they have agreed on round ``t``

Where a rank is lost, others may be a step ahead of the rest, but never more: no rank forgets a round before a barrier
has shown that all know the next one. Vectors are held as a copy; of the clients' state, only what the present round has
replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from ..rundir.best import Best
from ..rundir.client_values import ClientValues
from ..rundir.provenance import Segments

if TYPE_CHECKING:
    from ..rounds.silo import Silo

Done = dict[str, Any]  # a round: its record, and what the clients' values come from


class Left(NamedTuple):
    """A rank that was lost."""

    rank: int  # in the world that the run began with
    host: str
    after: int  # round


@dataclass
class Past:
    """What a run has recorded so far; on every rank, as any of them may have to serve."""

    records: list[dict[str, Any]]
    segments: Segments
    clients: ClientValues
    best: Best | None
    previous_known: bool

    def add(self, done: Done, x: Tensor) -> None:
        record = done["record"]
        self.records.append(record)
        if done["clients"]:
            self.clients.add(record["round"], *map(np.asarray, done["clients"]))
        if self.best:
            self.best.add(record, x)
        self.previous_known = True


class Held:
    def __init__(self, silo: Silo, start: int, past: Past):
        self.silo: Silo | None = silo
        self.round, self.past = start, past
        self.state = silo.trainer.client_state.vectors  # of this rank's clients
        self.s = {name: vector.clone() for name, vector in vars(silo.s).items()}
        self.before = silo.before.clone()
        self.done: Done | None = None  # a round that not all ranks may know of
        silo.trainer.client_state.keep_replaced()

    @property
    def latest(self) -> int:
        """The last round that this rank can go on from; it could from the one before, unless all can from this."""
        return self.done["record"]["round"] if self.done else self.round

    def take(self, done: Done | None) -> None:
        """The server's word that a round is complete."""
        if done is not None and self.silo is not None:
            self.done = done
            self.silo.world.barrier()
            self._advance(self.silo, done)

    def _advance(self, silo: Silo, done: Done) -> None:
        self.round, self.done = done["record"]["round"], None
        self.past.add(done, silo.s.x)
        self.before, self.s["x"] = self.s["x"], self.before  # the x of the round before, which is not copied again
        for name, vector in vars(silo.s).items():
            self.s[name].copy_(vector)
        silo.trainer.client_state.keep_replaced()

    def back_to(self, t: int) -> None:
        """To the state after round ``t``: ``latest``, or the one before. What else the rank had is free again."""
        if self.silo is not None:
            if self.done and self.latest == t:
                self._advance(self.silo, self.done)
            self.silo.trainer.client_state.put_back()
        self.done = self.silo = None
        assert self.round == t, f"round {t} is asked for, round {self.round} is held"
