"""What releases cost: privacy loss distributions of Gaussian noise on Poisson samples, by dp-accounting.

Two data sets are neighbours if one has a client more. A release is the sum of a Poisson sample's contributions, each of
norm 1 at most, plus noise of deviation z per coordinate. Every estimate is pessimistic: rounded to more loss.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..settings.dp_checks import LEAST_NOISE
from ..support.errors import UserError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

COARSEST, FINEST = 1e-3, 2e-5  # steps of the distributions
STEPS = 40  # in the deviation of one release's loss: more of them change epsilon by less than 0.1 %
CLOSE = 1.0005  # ratio of multipliers at which calibration ends
SLACK = 1e-5  # that calibration leaves of epsilon for the rounding of compositions


class Release(NamedTuple):
    """A sum over a sample."""

    share: float  # q, the probability of every client to be in it
    noise: float  # z, deviation over the largest norm


class Accountant:
    """The epsilon of releases so far.

    >>> accountant = Accountant(delta=1e-5, earlier=[])
    >>> for _ in range(100):
    ...     accountant.add(Release(share=0.05, noise=1.0))
    >>> round(accountant.epsilon, 2)
    3.5
    """

    def __init__(self, delta: float, earlier: Iterable[Release], expected: Iterable[Release] = ()):
        """``expected``: kinds of releases that will be added, which decide how finely losses are rounded."""
        self.delta, self._new = delta, Counter(earlier)
        self.step = min((_step(release) for release in (*self._new, *expected)), default=FINEST)
        self._spent: PrivacyLossDistribution | None = None
        self._kinds: dict[Release, PrivacyLossDistribution] = {}

    def add(self, release: Release) -> None:
        self._new[release] += 1

    @property
    def epsilon(self) -> float:
        self._compose()
        return 0.0 if self._spent is None else self._epsilon(self._spent)

    def epsilon_after(self, release: Release, count: int = 1) -> float:
        """The epsilon if so many releases were added."""
        self._compose()
        return self._epsilon(self._with(release, count))

    def _epsilon(self, spent: PrivacyLossDistribution) -> float:
        return float(spent.get_epsilon_for_delta(self.delta))

    def _compose(self) -> None:
        """What was added since the last time."""
        for release, count in self._new.items():
            self._spent = self._with(release, count)
        self._new.clear()

    def _with(self, release: Release, count: int) -> PrivacyLossDistribution:
        if release not in self._kinds:
            self._kinds[release] = _loss(release, self.step)
        more = self._kinds[release]
        more = more if count == 1 else more.self_compose(count)
        return more if self._spent is None else self._spent.compose(more)


def calibrated(share: float, releases: int, epsilon: float, delta: float) -> float:
    """The least noise multiplier with which so many releases cost no more than ``epsilon``."""

    def costs(noise: float) -> float:
        release = Release(share, noise)
        return Accountant(delta, [], [release]).epsilon_after(release, max(1, releases))

    most = epsilon * (1 - SLACK)
    low = high = 1.0
    at_low = at_high = costs(1.0)
    while at_high > most:
        low, at_low, high = high, at_high, 2 * high
        at_high = costs(high)
    while at_low <= most and low > LEAST_NOISE:
        high, at_high, low = low, at_low, low / 2
        at_low = costs(low)
    if at_low <= most:
        return max(low, LEAST_NOISE)
    while high / low > CLOSE:
        # Both are nearly straight lines in logarithms; a little more, to end on the safe side, then a little less.
        part = math.log(at_low / most) / math.log(at_low / at_high) if at_high > 0 else 0.5  # which is rounded to 0
        guess = low * (high / low) ** part * CLOSE**0.4
        guess = guess if guess < high * CLOSE**-0.5 else high / CLOSE
        cost = costs(guess)
        if cost <= most:
            high, at_high = guess, cost
        else:
            low, at_low = guess, cost
    return high


def _step(release: Release) -> float:
    deviation = release.share * math.sqrt(math.expm1(min(release.noise**-2, 50.0)))  # of the loss of one release
    return min(COARSEST, max(FINEST, deviation / STEPS))


def _loss(release: Release, step: float) -> PrivacyLossDistribution:
    try:
        from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
    except ImportError:
        raise UserError("--dp needs dp-accounting: pip install 'fedlada_mpi[privacy]'") from None
    return from_gaussian_mechanism(
        release.noise, value_discretization_interval=step, sampling_prob=release.share, pessimistic_estimate=True
    )
