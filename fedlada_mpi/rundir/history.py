"""What a run has recorded so far: on the root and, where any rank may have to serve, on all of them.

other = History.received(history.message(), clients, best)    the same on another rank
other.apply(history.change(record), x)                        and after another round
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .best import Best
from .client_values import ClientValues
from .provenance import Segments


@dataclass
class History:
    records: list[dict[str, Any]]
    segments: Segments
    clients: ClientValues
    best: Best | None  # where there is a validation set

    def message(self) -> dict[str, Any]:
        """Everything but the best model's vector, as JSON takes it."""
        return {
            "records": self.records,
            "segments": vars(self.segments),
            "clients": self.clients.known(),
            "best": self.best and self.best.record,
        }

    @classmethod
    def received(cls, message: dict[str, Any], clients: ClientValues, best: Best | None) -> History:
        """From another rank's message; ``clients`` and ``best`` have been restored from it."""
        return cls(message["records"], Segments(**message["segments"]), clients, best)

    def change(self, record: dict[str, Any]) -> dict[str, Any]:
        """What a round with this record has added, as JSON takes it."""
        return {"record": record, "clients": self.clients.row(record["round"])}

    def apply(self, change: dict[str, Any], x: Tensor) -> None:
        """What a round has added on another rank; ``x`` is its model."""
        record = change["record"]
        self.records.append(record)
        if change["clients"]:
            self.clients.append(record["round"], change["clients"])
        if self.best:
            self.best.add(record, x)

    def mark_changed(self) -> None:
        """Write all files again with the next checkpoint: another rank may have written other ones."""
        self.clients.changed = True
        if self.best:
            self.best.changed = True
