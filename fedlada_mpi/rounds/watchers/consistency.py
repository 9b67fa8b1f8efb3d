"""How far the participants end from the new global model: the column ``consistency``.

mean ||x_i - x^{t+1}||^2 = mean ||offset_i||^2 - ||mean offset||^2 + ||x^t - x^{t+1} - mean offset||^2

The formula is that of the plain mean. For a robust one, the ranks measure the distances themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...rundir.history import History
from ..silo import Silo
from ..vectors import quick_norm
from ..watcher import Finished, Watcher


class Consistency(Watcher):
    names = ("offset_norm2",)

    def __init__(self, silo: Silo):
        self.silo = silo
        self.offset: Tensor | None = None  # the mean, before the method may overwrite it

    def before_step(self, means: Mapping[str, Tensor]) -> None:
        if "offset" not in means:
            self.offset = None
        elif self.offset is None:
            self.offset = means["offset"].clone()
        else:
            self.offset.copy_(means["offset"])

    def numbers(self) -> Sequence[float]:
        silo = self.silo
        if "offset" not in silo.algorithm.up:
            return [0.0]
        return [silo.aggregation.distances(silo.x_previous, silo.s.x)]

    def columns(self, done: Finished) -> Mapping[str, Any]:
        silo, mean = self.silo, _mean(self.silo, done)
        if mean is None or not silo.aggregation.is_plain_mean:
            return {"consistency": mean}
        assert self.offset is not None
        rest = torch.sub(silo.x_previous, silo.s.x).sub_(self.offset)
        change = quick_norm(rest).square() - quick_norm(self.offset).square()
        # Rounding can leave it just under zero.
        return {"consistency": max(0.0, mean + float(change))}


def drift(silo: Silo, done: Finished) -> float | None:
    """The mean of ||x_{i,K} - x^t||^2; None where it is not known."""
    return _mean(silo, done) if silo.aggregation.is_plain_mean else None


def _mean(silo: Silo, done: Finished) -> float | None:
    """Of ||offset_i||^2, or of the distances; None where no participant sends an offset."""
    a = silo.algorithm
    known = done.r.participants and silo.aggregation.discloses and "offset" in a.up and a.communicates(done.r.t)
    total = done.r.participants if "offset" in a.uniform else done.weight
    return done.sums["offset_norm2"] / total if known else None


def create(silo: Silo, history: History | None) -> Watcher:
    return Consistency(silo)
