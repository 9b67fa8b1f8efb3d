"""How the clients fare one by one (``--eval-clients``): the columns of their spread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...rundir.client_values import ClientValues
from ...rundir.history import History
from ..evaluate import Evaluations, clients_due
from ..silo import Silo
from ..watcher import Finished, Order, Watcher


class ClientSpread(Watcher):
    """On every rank; the root has the ``values`` of the run."""

    def __init__(self, evaluations: Evaluations, values: ClientValues | None):
        self.evaluations, self.values = evaluations, values
        self.found: dict[str, np.ndarray] | None = None  # of the last round, if clients were evaluated

    def after(self, order: Order) -> None:
        due = clients_due(self.evaluations.config, order["round"]["t"] + 1)
        self.found = self.evaluations.clients_values() if due else None

    def columns(self, done: Finished) -> Mapping[str, Any]:
        assert self.values is not None
        if self.found is not None:
            return self.values.add(done.r.t + 1, self.found)
        spread, parts = self.values.clients.columns.spread, self.values.clients.parts
        return dict.fromkeys(column for part in reversed(parts) for column in spread[part])


def create(silo: Silo, history: History | None) -> Watcher | None:
    values = history.clients if history else None
    return ClientSpread(silo.evaluations, values) if silo.config.eval_clients else None
