"""The noise: its distribution, its grid, and where it comes from. Every limit is one in 10^9 by chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from fedlada_mpi.privacy.noise import BLOCK, FINE, Noise
from fedlada_mpi.privacy.sampling import secret_sample

CHANCE = 1e-9
SIGMAS = 6.1  # two-sided


def check_normal(values: np.ndarray, deviation: float = 1.0) -> None:
    """Kolmogorov and Smirnov, mean, variance, kurtosis and neighbours."""
    values, count = np.sort(values / deviation), len(values)
    cdf = ndtr(values)
    distance = max((np.arange(1, count + 1) / count - cdf).max(), (cdf - np.arange(count) / count).max())
    assert distance < math.sqrt(math.log(2 / CHANCE) / (2 * count))
    assert abs(values.mean()) < SIGMAS / math.sqrt(count)
    assert abs(values.var() - 1) < SIGMAS * math.sqrt(2 / count)
    assert abs((values**4).mean() - 3) < SIGMAS * math.sqrt(96 / count)


def test_normal_numbers():
    values = Noise().normal(1_000_001)
    check_normal(values)
    assert abs((values[1:] * values[:-1]).mean()) < SIGMAS / 1000
    halves = values[:500_000], values[500_000:1_000_000]  # of the same pairs
    assert abs((halves[0] * halves[1]).mean()) < SIGMAS / 700


@pytest.mark.slow
def test_two_million_released_numbers():
    """As a release has them: added to sums of zero."""
    released = torch.zeros(2 * 10**6)
    Noise().add_to(released, 2.5)
    check_normal(released.double().numpy(), 2.5)


def test_streams_are_fresh():
    one = Noise()
    drawn = [one.normal(4), one.normal(4), Noise().normal(4)]
    assert len(np.unique(np.concatenate(drawn))) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_get_noise_on_a_grid(dtype):
    count, deviation = BLOCK + 17, 0.3
    total = torch.linspace(-3, 5, count, dtype=dtype)
    released = total.clone()
    Noise().add_to(released, deviation)
    check_normal((released - total).double().numpy(), deviation)
    if dtype == torch.float64:
        units = released / (0.25 * FINE)
        assert torch.equal(units, units.round())


def test_only_parameters_get_noise():
    where = (torch.arange(1000) % 3 == 0).float()
    vector = torch.zeros(1000)
    Noise().add_to(vector, 1.0, where)
    assert torch.equal(vector != 0, where.bool())


def test_shares_add_up():
    """Of seven silos; six of them make all of the noise that is needed."""
    noises, deviation = [Noise() for _ in range(7)], 5000.0
    shares = np.stack([noise.whole(200_000, deviation / math.sqrt(6)) for noise in noises])
    assert shares.dtype == np.int64
    check_normal(shares[0], deviation / math.sqrt(6))
    check_normal(shares[:6].sum(0), deviation)


def test_secret_samples():
    clients = np.arange(100, 40_100)
    drawn = [secret_sample(clients, 0.3) for _ in range(2)]
    for sample in drawn:
        assert set(sample) <= set(clients)
        assert abs(len(sample) - 12_000) < SIGMAS * math.sqrt(40_000 * 0.3 * 0.7)
    both = len(np.intersect1d(*drawn))
    assert abs(both - 3_600) < SIGMAS * math.sqrt(40_000 * 0.09 * 0.91)
    assert secret_sample(clients, 1.0).tolist() == clients.tolist()
    assert secret_sample(clients[:0], 0.5).tolist() == []
