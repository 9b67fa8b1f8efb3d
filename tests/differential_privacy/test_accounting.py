"""Epsilon against published values, closed forms and dp-accounting's own accountant."""

from __future__ import annotations

import math

import pytest
from scipy.special import ndtr
from tiers import slow

from fedlada_mpi.privacy.accounting import Accountant, Release, calibrated
from fedlada_mpi.settings.dp_checks import LEAST_NOISE


def epsilon(share: float, noise: float, count: int, delta: float) -> float:
    release = Release(share, noise)
    return Accountant(delta, [], [release]).epsilon_after(release, count)


def gaussian_delta(noise: float, epsilon: float) -> float:
    """Of one Gaussian mechanism (Balle and Wang, 2018)."""
    half, tail = 1 / (2 * noise), epsilon * noise
    return ndtr(half - tail) - math.exp(epsilon) * ndtr(-half - tail)


@pytest.mark.parametrize(("noise", "count", "epsilon_"), [(1.0, 1, 3.0), (5.0, 10, 2.0), (20.0, 100, 1.5)])
def test_without_sampling_as_the_closed_form(noise, count, epsilon_):
    """Releases of one kind are one with less noise."""
    delta = gaussian_delta(noise / math.sqrt(count), epsilon_)
    assert epsilon(1.0, noise, count, delta) == pytest.approx(epsilon_, rel=0.005)


def test_published_values():
    """q = 0.01, noise 4, 10^4 steps: Abadi et al. (2016) print 1.26 at delta 1e-5 for the moments accountant, which is
    an upper bound; Koskela et al.'s PLD accountant prints delta(1.0) = 4.2435e-6."""
    assert epsilon(0.01, 4.0, 10**4, 4.2435e-6) == pytest.approx(1.0, rel=0.005)
    assert 0.9 < epsilon(0.01, 4.0, 10**4, 1e-5) < 1.26


# Share of clients, rounds, epsilon, delta, and the noise multiplier that is printed in docs/differential-privacy.md.
CALIBRATED = [
    (0.2, 100, 8.0, 1e-3, 1.17),
    slow(0.1, 300, 8.0, 1e-3, 1.07),
    slow(0.05, 1500, 8.0, 1e-5, 1.37),
    slow(0.05, 300, 8.0, 1e-5, 0.86),
    (0.05, 300, 2.0, 1e-5, 1.95),
]


@pytest.mark.parametrize(("share", "rounds", "asked", "delta", "expected"), CALIBRATED)
def test_calibration(share, rounds, asked, delta, expected):
    """By dp-accounting's own accountant, the noise costs what was asked, to 0.5 %, and never more."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    noise = calibrated(share, rounds, asked, delta)
    assert noise == pytest.approx(expected, abs=0.01)
    direct = PLDAccountant().compose(PoissonSampledDpEvent(share, GaussianDpEvent(noise)), rounds)
    assert direct.get_epsilon(delta) == pytest.approx(asked, rel=0.005)
    assert epsilon(share, noise, rounds, delta) <= asked


def test_calibration_of_any_epsilon():
    """Of one so small that all that is less rounds to 0, and of one that the least noise does not reach."""
    assert epsilon(0.2, calibrated(0.2, 3, 1e-10, 1e-4), 3, 1e-4) <= 1e-10
    assert calibrated(1.0, 1, 1e12, 1e-4) == LEAST_NOISE


def test_one_by_one_as_all_at_once():
    release = Release(0.1, 1.2)
    accountant, found = Accountant(1e-4, [], [release]), []
    for _ in range(30):
        accountant.add(release)
        found.append(accountant.epsilon)
    assert found == sorted(found)
    assert found[0] > 0
    assert found[-1] == pytest.approx(epsilon(0.1, 1.2, 30, 1e-4), rel=1e-4)
    assert Accountant(1e-4, [release] * 30).epsilon == pytest.approx(found[-1], rel=1e-4)


def test_releases_of_several_kinds_add_up():
    """Two kinds without sampling: 1 / z^2 adds up."""
    kinds = [Release(1.0, 4.0)] * 4 + [Release(1.0, 2.0)] * 2
    noise = (4 / 16 + 2 / 4) ** -0.5
    delta = gaussian_delta(noise, 3.0)
    assert Accountant(delta, kinds).epsilon == pytest.approx(3.0, rel=0.005)


def test_nothing_is_spent_at_first():
    assert Accountant(1e-5, []).epsilon == 0
