"""What watches the rounds of a run and changes nothing in them: recorder, progress, diagnosis, best model, callbacks.

A watcher is one file with one class, in ``rounds/watchers/`` or where its subject is. Watchers that take part in
communication are on every rank, in the same order; others are on the root alone. A round calls, in this order:

    permits        root         whether the round may begin
    order          root         the server's order may ask the other ranks for something
    ordered        every rank   the order has arrived
    before_step    root         the means are there, and the server has not stepped
    numbers        every rank   of the round; the root gets their sums
    after          every rank   everything is evaluated
    columns        root         for the record of the round
    recorded       root         the record is complete

``order`` and ``ordered`` are called for checkpoints, too, and then ``save`` on the root. Those of every rank are closed
where the run ends, also by an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..algorithms import Round

Order = dict[str, Any]  # a small message as JSON takes it


@dataclass(frozen=True)
class Finished:
    """A round as its watchers see it, on the root."""

    r: Round  # with the participants whose result counts
    participants: np.ndarray | None  # all that were called; None if they are secret
    weight: float  # the sum of the weights of those that count
    sums: Mapping[str, float]  # of every rank's numbers, by name


class Watcher:
    """Watches rounds; every method may be left out.

    >>> class Slowest(Watcher):
    ...     def recorded(self, record):
    ...         print(max(record["seconds_by_rank"]["train"]))
    """

    names: Sequence[str] = ()  # of its ``numbers``
    nbytes: int = 0  # of memory on the rank's device

    def permits(self, t: int) -> bool:
        """Whether round ``t`` may begin; otherwise the run stops before it, with a checkpoint."""
        return True

    def order(self, order: Order) -> None:
        """Add to an order of the server, under a name of its own."""

    def ordered(self, order: Order) -> None:
        """An order has arrived on every rank; collective."""

    def before_step(self, means: Mapping[str, Tensor]) -> None:
        """The server is going to step from these means."""

    def numbers(self) -> Sequence[float]:
        """One for each of ``names``; collective."""
        return ()

    def after(self, order: Order) -> None:
        """The round has been evaluated; collective."""

    def columns(self, done: Finished) -> Mapping[str, Any]:
        """What is recorded of the round (``rundir/columns.py``)."""
        return {}

    def recorded(self, record: dict[str, Any]) -> bool | None:
        """The whole record of the round; False stops the run after it."""
        return None

    def save(self, t: int) -> Mapping[str, Tensor]:
        """Before a checkpoint after round ``t``: write what belongs to it, and return what is stored in it."""
        return {}

    def close(self) -> None:
        """The run has ended on this rank, as it may anywhere in a round; not collective."""
