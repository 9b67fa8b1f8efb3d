"""Sums that are differentially private: of contributions no longer than the clip, and with noise (``--dp client``).

c_i = (offset_i, scaled v_hat_i - v, ...), all that client i sends, is multiplied by min(1, C / |c_i|). Their sum gets
N(0, (z C)^2) in every coordinate, and is divided by q m, the expected number of participants. What else clients would
send, such as their losses, is left out.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...algorithms import Round, Vectors
from ...privacy import clipping
from ...privacy.mechanism import Mechanism
from ...privacy.noise import Noise
from ...settings.dp_checks import LEAST_CLIP, MOST_CLIP
from ...settings.fields import MOST_RANGE
from ...support.errors import PublicError
from ..costs import MOST_ROUNDS
from ..rates import local_rate
from ..vectors import norm
from .base import Aggregation, Part, Sent
from .plain import PlainSums
from .secure import COUNTED, SecureSums

# Silos that know a share of the noise, which is then none to them: each knows its own.
KNOWING = 1
LEAST_UNITS = 2**10  # of a grid, in the deviation of a share: sums of rounded shares are then as good as Gaussian
TAIL = 10  # deviations of all noise, for which a sum has room


class PrivateSums(Aggregation):
    """For a kind of sums: clips what comes in, and makes means of what has noise.

    >>> aggregation.protect(mechanism, s, real)      # once
    >>> aggregation.clip = 1.0                       # before every round, on every rank
    """

    discloses = False
    excess = 1.0  # deviation of all noise, over that which the privacy needs
    clips = (LEAST_CLIP, MOST_CLIP)  # between which an adaptive clip stays

    def _allocate(self) -> None:
        super()._allocate()
        self.clip = 0.0
        self.within = self.share_within = 0.0  # sum over clients; share of those whose norm was within the clip
        self.scales: Mapping[str, float] = {}
        self.known: Mapping[str, float] = {}  # scalars that are public

    def protect(self, mechanism: Mechanism, s: Vectors, real: Tensor) -> None:
        """``s``: the server's vectors; ``real`` is one at their elements that are parameters."""
        self.mechanism, self.real, self.stream = mechanism, real, Noise()
        bases = {**self.algorithm.change_of, **self.algorithm.dp.changes}
        self.bases = {name: getattr(s, of) for name, of in bases.items() if name in self.vectors}

    def prepare(self, r: Round, participants: np.ndarray) -> None:
        self.scales, self.known = self.algorithm.dp_scales(r), self.algorithm.dp_scalars(r)
        super().prepare(r, participants)

    def begin(self, count: int) -> None:
        super().begin(count)
        self.within = 0.0

    def add(self, sent: Sent) -> None:
        scalars = {name: values for name, values in sent.scalars.items() if name not in self.known}
        nothing = np.zeros_like(sent.losses)
        sent = replace(sent, scalars=scalars, losses=nothing, norms2=nothing)
        norms = self._norms(sent)
        self._take(self._changes(replace(sent, weights=clipping.factors(norms, self.clip))))
        if self.mechanism.adaptive:
            self.within += clipping.within(norms, self.clip)

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
        bases = self._bases_here
        if not bases:
            return sent

        def changed(part: Part) -> Part:
            rows = {name: part.rows[name] - base[part.where] for name, base in bases.items()}
            return part._replace(rows={**part.rows, **rows})

        return replace(sent, parts=[changed(part) for part in sent.parts])

    @property
    def _bases_here(self) -> Mapping[str, Tensor]:
        """Of the vectors whose changes are taken here."""
        return self.bases

    def means(self, weight: float, participants: float) -> dict[str, Tensor]:
        self._release()
        expected, least = self.mechanism.expected, self.algorithm.dp_least()
        means = {name: total.div_(expected) for name, total in self.vectors.items()}
        for name, base in self.bases.items():
            means[name].add_(base)
        for name in means.keys() & least.keys():
            means[name].clamp_(min=least[name])
        self.share_within = self.within / expected + 0.5
        numbers = {name: total / expected for name, total in self.scalars.items()} | dict(self.known)
        return means | {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    def _release(self) -> None:
        """Add noise to the sums on the root, unless they have it already."""

    def deviation(self, name: str) -> float:
        """Of the noise on a sum."""
        return self.mechanism.vector_noise * self.clip / self.scales.get(name, 1.0)


class PrivatePlainSums(PrivateSums, PlainSums):
    """With the root's noise on its sums."""

    def _take(self, sent: Sent) -> None:
        PlainSums.add(self, sent)

    def reduce(self, participants: np.ndarray, communicates: bool) -> None:
        super().reduce(participants, communicates)
        if self.mechanism.adaptive:
            self.within = float(self.world.gather([self.within]).sum())

    def _release(self) -> None:
        for name, total in self.vectors.items():
            self.stream.add_to(total, self.deviation(name), self.real)
        self.scalars = {name: self.stream.added(v, self.deviation(name)) for name, v in self.scalars.items()}
        if self.mechanism.adaptive:
            self.within = self.stream.added(self.within, self.mechanism.bit_deviation)


class PrivateSecureSums(PrivateSums, SecureSums):
    """With shares of the noise from all silos, below their masks: nobody sees a sum without noise."""

    # Called before anything of round ``number`` is computed: a silo may refuse to take part in another release.
    spend: Callable[[int, float], None] = staticmethod(lambda number, clip: None)

    def prepare(self, r: Round, participants: np.ndarray) -> None:
        least, most = self._fitting(r)
        if not least <= self.clip <= most:  # the server might choose one whose noise vanishes, or wraps around
            raise PublicError(
                f"round {r.t + 1}: noise on a clip of {self.clip:g} does not fit the grid of --secure-range "
                f"{self.config.secure_range:g}"
            )
        self.spend(r.t + 1, self.clip)
        super().prepare(r, participants)

    def protect(self, mechanism: Mechanism, s: Vectors, real: Tensor) -> None:
        super().protect(mechanism, s, real)
        self.whole_real = real.to(self.transport.device, torch.int64)
        self.excess = (len(self.masks.epoch.silos) / self._needed) ** 0.5
        if self.masks.epoch.own:
            self.noise = self._share
        fitting = [self._fitting(r) for r in self._rounds()]
        self.clips = max(least for least, _ in fitting), min(most for _, most in fitting)
        self._refuse_misfit()

    def _rounds(self) -> list[Round]:
        """Those of the run, by what noise depends on."""
        c = self.config
        rates = {local_rate(c, t) for t in (*range(min(c.rounds, MOST_ROUNDS)), c.rounds - 1)}
        return [Round(0, rate, float(c.local_steps), self.mechanism.expected, c.clients) for rate in rates]

    def _fitting(self, r: Round) -> tuple[float, float]:
        """The least and the largest clip whose noise is more than the grids' rounding, and stays within 64 bits."""
        least, most, scales = 0.0, math.inf, self.algorithm.dp_scales(r)
        for name, grid in self.grids.items():
            z, scale = self.mechanism.vector_noise, scales.get(name, 1.0)
            least = max(least, LEAST_UNITS * scale / self._units(z, grid.step))
            # Of a client, a number is not larger than the clip, nor than the limit of the grid.
            room, noise = grid.step * 2.0**63, TAIL * z * self.excess
            fits = max(room / (noise + grid.weights), (room - grid.limit * grid.weights) / noise)
            most = min(most, scale * fits)
        return least, most

    def _refuse_misfit(self) -> None:
        """Refuse settings whose noise is below the grids, or so large that sums would wrap around."""
        c, (least, most) = self.config, self.clips
        noise = f"--dp client: noise on a clip of {c.clip_norm:g}"
        if c.clip_norm < least:
            raise PublicError(
                f"{noise} is below the grid of --secure-range {c.secure_range:g}: make the range smaller, or "
                "--clip-norm larger"
            )
        if c.clip_norm > most:
            larger = 2.0 ** (math.ceil(math.log2(c.secure_range)) + math.ceil(math.log2(c.clip_norm / most)))
            enough = f"--secure-range {larger:.0f}, or " if larger <= MOST_RANGE else ""
            raise PublicError(
                f"{noise}, {self.mechanism.noise:g} times that in every coordinate, is too large for the grid of "
                f"--secure-range {c.secure_range:g}: expected {enough}--clip-norm at most {0.995 * most:.3g}"
            )
        bits = TAIL * self.mechanism.bit_deviation * self.excess + self.numbers["loss"].weights
        if self.mechanism.adaptive and bits > self.numbers["loss"].step * 2.0**63:
            raise PublicError(
                f"--adaptive-clip: noise of {self.mechanism.noise:g} is too large for the grid of its counts: leave "
                "it out, or choose a smaller --noise-multiplier"
            )

    @property
    def _bases_here(self) -> Mapping[str, Tensor]:
        return {name: base for name, base in self.bases.items() if name not in self.algorithm.change_of}

    def _share(self, name: str, count: int) -> Tensor:
        share = self._units(self.deviation(name), self.grids[name].step)
        drawn = torch.from_numpy(self.stream.whole(count, share)).to(self.transport.device)
        return drawn if name in self.algorithm.scalars else drawn.mul_(self.whole_real)

    def _units(self, deviation: float, step: float) -> float:
        """The deviation of one silo's share, in units of a grid."""
        return deviation / step / self._needed**0.5

    @property
    def _needed(self) -> int:
        """Silos whose shares are enough noise."""
        return max(1, len(self.masks.epoch.silos) - KNOWING)

    def begin(self, count: int) -> None:
        super().begin(count)
        self._forget()

    def _take(self, sent: Sent) -> None:
        SecureSums.add(self, sent)
        self._forget()

    def _forget(self) -> None:
        """What is counted of participants has no noise."""
        self.counts.update(dict.fromkeys(COUNTED, 0))

    def reduce(self, participants: np.ndarray, communicates: bool) -> None:
        if self.mechanism.adaptive:  # in the place of the losses, which are not sent
            self.counts["loss"] = self.numbers["loss"].whole(np.array([self.within]))
        super().reduce(participants, communicates)
        self.within, self.loss = self.loss, 0.0

    def _add_noise(self, tail: Tensor) -> None:
        super()._add_noise(tail)
        if self.noise is not None and self.mechanism.adaptive:
            share = self._units(self.mechanism.bit_deviation, self.numbers["loss"].step)
            tail[self.places["loss"]] += int(self.stream.whole(1, share)[0])


def _norm(row: Tensor, base: Tensor | None) -> float:
    change = row if base is None else row - base
    return float(norm(change))
