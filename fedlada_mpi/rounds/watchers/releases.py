"""Private rounds (``--dp``): each is in the ledger before it begins, and none begins that the budget does not allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...privacy.budget import Budget
from ...privacy.clipping import QUANTILE, next_clip
from ...rundir.history import History
from ..aggregate import PrivateSums
from ..evaluate import parts_due
from ..silo import Silo
from ..watcher import Finished, Order, Watcher


class Releases(Watcher):
    """On every rank; the root has the ``budget``, and knows the clip of the next round."""

    def __init__(self, silo: Silo, aggregation: PrivateSums, budget: Budget | None, history: History | None):
        self.silo, self.aggregation, self.budget = silo, aggregation, budget
        self.adaptive, self.clip = silo.config.adaptive_clip, silo.config.clip_norm
        if self.adaptive and history and history.records:
            last = history.records[-1]
            self.clip = self._next(last["clip_norm"], last["within_clip"])

    def permits(self, t: int) -> bool:
        assert self.budget is not None
        return self.budget.permits()

    def order(self, order: Order) -> None:
        if order["do"] == "round":
            assert self.budget is not None
            order["clip"] = self.clip
            self.budget.spend(order["round"]["t"] + 1, self.clip)
        elif order["do"] == "void":
            assert self.budget is not None
            self.budget.leave_out(order["t"] + 1)

    def ordered(self, order: Order) -> None:
        if order["do"] == "round":
            self.aggregation.clip = order["clip"]

    def columns(self, done: Finished) -> Mapping[str, Any]:
        assert self.budget is not None
        evaluated = parts_due(self.silo.config, done.r.t + 1, validation=False)
        found = {"epsilon": self.budget.epsilon if evaluated else None, "clip_norm": self.clip}
        if not self.adaptive:
            return found
        # A round that is left out has released nothing.
        within = self.aggregation.share_within if done.participants is None else QUANTILE
        self.clip = self._next(self.clip, within)
        return {**found, "within_clip": within}

    def _next(self, clip: float, within: float) -> float:
        """The clip of the next round, whose noise fits."""
        least, most = self.aggregation.clips
        return min(max(next_clip(clip, within), least), most)


def create(silo: Silo, history: History | None) -> Watcher | None:
    if not isinstance(silo.aggregation, PrivateSums):
        return None
    return Releases(silo, silo.aggregation, silo.budget, history)
