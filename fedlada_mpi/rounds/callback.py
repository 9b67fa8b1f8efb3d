"""A caller's own function, called with the record of every round."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from ..support.errors import CallbackError
from ..support.user_code import same_directory
from .watcher import Watcher

OnRound: TypeAlias = Callable[[dict[str, Any]], object]  # gets the round's record; False stops the run


class Callback(Watcher):
    def __init__(self, on_round: OnRound):
        self.on_round = on_round

    def recorded(self, record: dict[str, Any]) -> bool:
        try:
            with same_directory():
                return not is_false(self.on_round(deepcopy(record)))
        except BaseException as error:  # an interrupt, too: the other ranks wait for the next order
            raise CallbackError(f"on_round failed on rank 0: {type(error).__name__}: {error}") from error


def is_false(answer: object) -> bool:
    """Whether it is ``False``, as Python, numpy or torch has it; 0, None and what is empty are not."""
    if isinstance(answer, (np.generic, np.ndarray, Tensor)) and answer.shape == ():
        answer = answer.item()
    return answer is False
