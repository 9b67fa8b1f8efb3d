"""A caller's own function, called with the record of every round."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeAlias

from ..support.errors import CallbackError
from .watcher import Watcher

OnRound: TypeAlias = Callable[[dict[str, Any]], object]  # gets the round's record; False stops the run


class Callback(Watcher):
    def __init__(self, on_round: OnRound):
        self.on_round = on_round

    def recorded(self, record: dict[str, Any]) -> bool:
        try:
            return self.on_round(deepcopy(record)) is not False
        except (Exception, SystemExit) as error:
            raise CallbackError(f"on_round failed on rank 0: {type(error).__name__}: {error}") from error
