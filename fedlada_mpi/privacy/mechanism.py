"""The Gaussian mechanism of a run: how much noise the sum of a round gets."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from ..settings import Config
from .accounting import Release

BIT_SHARE = 20  # the count of norms within the clip has noise of a so-manieth of the expected participants


@dataclass(frozen=True)
class Mechanism:
    share: float  # q
    clients: int  # m, without those of ranks that were lost
    noise: float  # z of the whole release
    adaptive: bool = False

    @classmethod
    def of(cls, config: Config, noise: float, clients: int | None = None) -> Mechanism:
        """``clients``: that a rank trains; all, unless they are given."""
        return cls(config.participation, config.clients if clients is None else clients, noise, config.adaptive_clip)

    @property
    def release(self) -> Release:
        return Release(self.share, self.noise)

    @property
    def expected(self) -> float:
        """Participants of a round: the denominator of all means, as their true number is data."""
        return self.share * self.clients

    @property
    def bit_deviation(self) -> float:
        """Of the noise on the sum of +-1/2 per client, with --adaptive-clip."""
        return max(self.expected / BIT_SHARE, self.noise)

    @property
    def vector_noise(self) -> float:
        """z of the vectors: with that of the bits, the release costs as much as one with z alone."""
        return self.noise / sqrt(1 - (self.noise / (2 * self.bit_deviation)) ** 2) if self.adaptive else self.noise

    def noise_over_clip(self, numbers: int) -> float:
        """The norm of the noise of a mean of so many numbers, as a multiple of the clip."""
        return self.vector_noise * sqrt(numbers) / self.expected
