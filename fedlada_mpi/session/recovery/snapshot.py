"""What every rank keeps of the last round that all have done, so that the others can go on when a rank is lost.

    snapshot = Snapshot(silo, start, history)   after the ranks have shared the vectors of round ``start``
    snapshot.take(change)                       with the server's next order: a round is complete
    snapshot.back_to(t)                         on the ranks that are left, once they have agreed on round ``t``

Where a rank is lost, others may be a step ahead of the rest, but never more: no rank forgets a round before a barrier
has shown that all know the next one. Vectors are kept as a copy; of the clients' state, only what the present round has
replaced.
"""

from __future__ import annotations

from typing import Any

from ...rounds.silo import Silo
from ...rounds.watcher import Order, Watcher
from ...rundir.history import History

Change = dict[str, Any]  # what a round has added to the history


class Snapshot(Watcher):
    """On every rank; ``history`` is this rank's copy, and the root hands on the changes of its own."""

    def __init__(self, silo: Silo, start: int, history: History, of_root: History | None = None):
        self.silo: Silo | None = silo
        self.round, self.history, self.of_root = start, history, of_root
        self.state = silo.trainer.client_state.vectors  # of this rank's clients
        self.s = {name: vector.clone() for name, vector in vars(silo.s).items()}
        self.x_previous, self.previous_known = silo.x_previous.clone(), silo.previous_known
        self.pending: Change | None = None  # the root's, that the other ranks do not know of yet
        self.unsure: Change | None = None  # a round that not all ranks may know of
        self.nbytes = sum(vector.nbytes for vector in (*self.s.values(), self.x_previous))
        silo.trainer.client_state.keep_replaced()

    def order(self, order: Order) -> None:
        order["done"], self.pending = self.pending, None

    def ordered(self, order: Order) -> None:
        self.take(order.get("done"))

    def recorded(self, record: dict[str, Any]) -> None:
        assert self.of_root is not None
        self.pending = self.of_root.change(record)

    @property
    def latest(self) -> int:
        """The last round that this rank can go on from; until all ranks know of it, also from the one before."""
        return self.unsure["record"]["round"] if self.unsure else self.round

    def take(self, change: Change | None) -> None:
        """The server's word that a round is complete."""
        if change is not None and self.silo is not None:
            self.unsure = change
            self.silo.world.barrier()
            self._advance(self.silo, change)

    def _advance(self, silo: Silo, change: Change) -> None:
        self.round, self.unsure = change["record"]["round"], None
        self.history.apply(change, silo.s.x)
        self.x_previous, self.s["x"] = self.s["x"], self.x_previous  # the x of the round before is not copied again
        self.previous_known = True
        for name, vector in vars(silo.s).items():
            self.s[name].copy_(vector)
        silo.trainer.client_state.keep_replaced()

    def back_to(self, t: int) -> None:
        """To the state after round ``t``: ``latest``, or the one before. What else the rank had is free again."""
        if self.silo is not None:
            if self.unsure and self.latest == t:
                self._advance(self.silo, self.unsure)
            self.silo.trainer.client_state.put_back()
        self.unsure = self.pending = self.silo = self.of_root = None
        assert self.round == t, f"round {t} is asked for, round {self.round} is kept"

    def restore(self, silo: Silo) -> None:
        """Into the silo of the ranks that are left."""
        for name, vector in self.s.items():
            getattr(silo.s, name).copy_(vector)
        silo.x_previous.copy_(self.x_previous)
        silo.previous_known = self.previous_known
        silo.trainer.client_state.vectors = self.state
