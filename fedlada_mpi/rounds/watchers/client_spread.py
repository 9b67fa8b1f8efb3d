"""How the clients fare one by one (``--eval-clients``): the columns of their spread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...rundir.client_values import ClientValues
from ...rundir.columns import SPREAD
from ...rundir.history import History
from ..evaluate import Evaluations, clients_due
from ..silo import Silo
from ..watcher import Finished, Order, Watcher


class ClientSpread(Watcher):
    """On every rank; the root has the ``values`` of the run."""

    def __init__(self, evaluations: Evaluations, values: ClientValues | None):
        self.evaluations, self.values = evaluations, values
        self.sums: tuple[np.ndarray, np.ndarray] | None = None  # of the last round, if clients were evaluated

    def after(self, order: Order) -> None:
        due = clients_due(self.evaluations.config, order["round"]["t"] + 1)
        self.sums = self.evaluations.by_client_and_class() if due else None

    def columns(self, done: Finished) -> Mapping[str, Any]:
        assert self.values is not None
        return dict.fromkeys(SPREAD) if self.sums is None else self.values.add(done.r.t + 1, *self.sums)


def create(silo: Silo, history: History | None) -> Watcher | None:
    values = history.clients if history else None
    return ClientSpread(silo.evaluations, values) if silo.config.eval_clients else None
