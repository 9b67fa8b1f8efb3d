"""Sums that are differentially private: of contributions no longer than the clip, and with noise (``--dp client``).

c_i = (offset_i, scaled v_hat_i - v, ...), all that client i sends, is multiplied by min(1, C / |c_i|). Their sum gets
N(0, (z C)^2) in every coordinate, and is divided by q m, the expected number of participants. What else clients would
send, such as their losses, is left out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...algorithms import Round, Vectors
from ...privacy import clipping
from ...privacy.mechanism import Mechanism
from ...privacy.noise import Noise
from .base import Aggregation, Part, Sent
from .plain import PlainSums

WITHIN = "within_clip"  # with --adaptive-clip, a number that goes up next to the method's own


class PrivateSums(Aggregation):
    """For a kind of sums: clips what comes in, and makes means of what has noise.

    >>> aggregation.protect(mechanism, s, real)      # once
    >>> aggregation.clip = 1.0                       # before every round, on every rank
    """

    discloses = False

    def _allocate(self) -> None:
        super()._allocate()
        self.clip, self.share_within = 0.0, 0.0
        self.scales: Mapping[str, float] = {}
        self.known: Mapping[str, float] = {}  # scalars that are public

    def protect(self, mechanism: Mechanism, s: Vectors, real: Tensor) -> None:
        """``s``: the server's vectors; ``real`` is one at their elements that are parameters."""
        self.mechanism, self.real, self.noise = mechanism, real, Noise()
        self.bases = {name: getattr(s, of) for name, of in self.algorithm.dp.changes.items() if name in self.vectors}
        self._clear()

    def prepare(self, r: Round, participants: np.ndarray) -> None:
        super().prepare(r, participants)
        self.scales, self.known = self.algorithm.dp_scales(r), self.algorithm.dp_scalars(r)

    def _clear(self) -> None:
        super()._clear()
        if self.algorithm.config.adaptive_clip:
            self.scalars[WITHIN] = 0.0

    def add(self, sent: Sent) -> None:
        scalars = {name: values for name, values in sent.scalars.items() if name not in self.known}
        nothing = np.zeros_like(sent.losses)
        sent = replace(sent, scalars=scalars, losses=nothing, norms2=nothing)
        norms = self._norms(sent)
        self._take(self._changes(replace(sent, weights=clipping.factors(norms, self.clip))))
        if self.config.adaptive_clip:
            self.scalars[WITHIN] += clipping.within(norms, self.clip)

    @abstractmethod
    def _take(self, sent: Sent) -> None:
        """Add to the sums, with the weights as they are."""

    def _norms(self, sent: Sent) -> np.ndarray:
        """Of all that each client sends."""
        squares = np.zeros(len(sent.clients))
        for part in sent.parts:
            for name in self.vectors:
                base, scale = self.bases.get(name), self.scales.get(name, 1.0)
                rows = [0] if part.shared else part.which.tolist()
                found = [_norm(part.rows[name][row], None if base is None else base[part.where]) for row in rows]
                squares += np.square(np.multiply(found, scale))
        for name, values in sent.scalars.items():
            squares += np.square(values * self.scales.get(name, 1.0))
        return np.sqrt(squares)

    def _changes(self, sent: Sent) -> Sent:
        """With the changes of those vectors that are sent as such."""
        if not self.bases:
            return sent

        def changed(part: Part) -> Part:
            rows = {name: part.rows[name] - base[part.where] for name, base in self.bases.items()}
            return part._replace(rows={**part.rows, **rows})

        return replace(sent, parts=[changed(part) for part in sent.parts])

    def means(self, weight: float, participants: float) -> dict[str, Tensor]:
        self._release()
        expected, least = self.mechanism.expected, self.algorithm.dp_least()
        means = {name: total.div_(expected) for name, total in self.vectors.items()}
        for name, base in self.bases.items():
            means[name].add_(base)
        for name in means.keys() & least.keys():
            means[name].clamp_(min=least[name])
        if self.config.adaptive_clip:
            self.share_within = self.scalars[WITHIN] / expected + 0.5
        numbers = {name: self.scalars[name] / expected for name in self.algorithm.scalars if name not in self.known}
        numbers = {**numbers, **self.known}
        return means | {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    def _release(self) -> None:
        """The sums on the root, with noise."""
        deviation = self.mechanism.vector_noise * self.clip
        for name, total in self.vectors.items():
            self.noise.add_to(total, deviation / self.scales.get(name, 1.0), self.real)
        for name in self.scalars:
            size = self.mechanism.bit_deviation if name == WITHIN else deviation / self.scales.get(name, 1.0)
            self.scalars[name] = self.noise.added(self.scalars[name], size)


class PrivatePlainSums(PrivateSums, PlainSums):
    """With the root's noise on its sums."""

    def _take(self, sent: Sent) -> None:
        PlainSums.add(self, sent)


def _norm(row: Tensor, base: Tensor | None) -> float:
    change = row if base is None else row - base
    return float(torch.linalg.vector_norm(change, dtype=torch.float64))
