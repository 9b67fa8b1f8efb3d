"""A silo's own results: the model on its examples alone, recorded in its directory, which other ranks do not see."""

from __future__ import annotations

from ...rundir.history import History
from ..silo import Silo
from ..watcher import Order, Watcher


class SiloResults(Watcher):
    def __init__(self, silo: Silo):
        self.silo = silo

    def after(self, order: Order) -> None:
        folder = self.silo.folder
        if folder is not None and order["evaluate"]:
            self.silo.world.collectively(lambda: folder.record(self._record(order)))

    def _record(self, order: Order) -> dict[str, object]:
        return {"round": order["round"]["t"] + 1, **self.silo.evaluations.of_this_rank()}


def create(silo: Silo, history: History | None) -> Watcher | None:
    return SiloResults(silo) if silo.folder is not None else None
