"""The model of the round that is best on the validation set, ``best.pt``; the test set has no part in the choice.

``best.pt`` is replaced before every checkpoint. The checkpoints have the best model so far, too, from which a resumed
run takes it: best.pt may be of a later round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..support import disk
from . import checkpoint
from .columns import CLASSIFICATION, LOSS, Columns
from .results import BEST, write_model

# Names in a checkpoint: the vector, and the record of its round.
_X, _RECORD = "run/best", "run/best_record"


class Best:
    """The best round so far; ``saved`` makes the content of a model file from a vector ``x``."""

    def __init__(
        self,
        out: Path,
        resumed_at: int,
        like: Tensor,
        saved: Callable[[Tensor], Mapping[str, Any]],
        columns: Columns = CLASSIFICATION,
    ):
        self.path, self.saved, self.objective = out / BEST, saved, columns.objective
        self.x: Tensor | None = None
        self.record: dict[str, Any] | None = None
        self.changed = False
        if resumed_at:
            x, record = (checkpoint.read_more(out, resumed_at, name) for name in (_X, _RECORD))
            if x is not None and record is not None:
                self.x, self.record = torch.from_numpy(x).to(like), json.loads(record.tobytes())
                self.changed = True
            else:  # not evaluated up to the checkpoint: a file is of a later round, which will be repeated
                with disk.writing(self.path):
                    self.path.unlink(missing_ok=True)
            self.write()

    def restore(self, x: Tensor, record: dict[str, Any]) -> None:
        """Take what another rank had."""
        self.x, self.record, self.changed = x, record, True

    def add(self, record: Mapping[str, Any], x: Tensor) -> None:
        """Take the model of a round, if it is better than all before; of equals the first counts."""
        column = self.objective.of("val")
        value = record[column]
        if value is None or value != value or (self.record and not self.objective.better(value, self.record[column])):
            return
        self.x = x.clone() if self.x is None else self.x.copy_(x)
        recorded = dict.fromkeys(("round", column, LOSS.of("val"), self.objective.of("test")))
        self.record, self.changed = {name: record[name] for name in recorded}, True

    def write(self) -> None:
        """Replace the file, if there is something new."""
        if self.changed and self.x is not None:
            write_model(self.path, self.saved(self.x.cpu()))
            self.changed = False

    def is_missing(self) -> bool:
        """Whether the file was written, and is not there."""
        return self.x is not None and not self.changed and not self.path.is_file()

    def kept(self) -> dict[str, Tensor]:
        """What a checkpoint has of it."""
        if self.x is None:
            return {}
        record = bytearray(json.dumps(self.record).encode())
        return {_X: self.x, _RECORD: torch.frombuffer(record, dtype=torch.uint8)}
