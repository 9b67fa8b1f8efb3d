"""Draws: the participants of a round, and randomness that is a function of (seed, purpose, round, client) alone."""

from __future__ import annotations

import numpy as np
import pytest

from fedlada_mpi.support import rng


@pytest.mark.parametrize(("clients", "share", "count"), [(100, 0.1, 10), (50, 0.2, 10), (7, 0.3, 2), (5, 1.0, 5)])
def test_fixed_sampling_draws_exactly_s(clients, share, count):
    for t in range(20):
        found = rng.participants(clients, share, "fixed", 0, t)
        assert len(found) == len(set(found.tolist())) == count
        assert found.tolist() == sorted(found.tolist())
        assert 0 <= found[0] <= found[-1] < clients


def test_fixed_sampling_is_uniform():
    rounds = 3000
    counts = np.zeros(20)
    for t in range(rounds):
        counts[rng.participants(20, 0.25, "fixed", 1, t)] += 1
    assert np.abs(counts / rounds - 0.25).max() < 5 * (0.25 * 0.75 / rounds) ** 0.5


def test_bernoulli_sampling_has_the_rate_and_the_spread():
    sizes = np.array([len(rng.participants(100, 0.1, "bernoulli", 2, t)) for t in range(1000)])
    assert abs(sizes.mean() - 10) < 5 * (9 / 1000) ** 0.5
    assert 7 < sizes.var() < 11, "the variance of a binomial of 100 with 0.1 is 9"
    assert len(rng.participants(100, 1.0, "bernoulli", 2, 0)) == 100


def test_draws_are_a_pure_function():
    """Whatever was drawn before, by whom and in which order; and numpy's own state is not touched."""
    state = np.random.get_state()[1].tolist()  # noqa: NPY002 (the global one must stay as it is)
    first = {(t, client): rng.permutations(6, 2, 3, t, client).tolist() for t in range(3) for client in range(3)}
    again = {key: rng.permutations(6, 2, 3, *key).tolist() for key in reversed(first)}
    assert again == first
    assert len({str(v) for v in first.values()}) == 9
    assert rng.bits(4, 1, rng.SAMPLE, 0).tolist() == rng.bits(9, 1, rng.SAMPLE, 0)[:4].tolist()
    assert len({tuple(rng.bits(2, 1, purpose, 5, 5)) for purpose in (rng.SAMPLE, rng.SHUFFLE, rng.AUGMENT)}) == 3
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def test_draws_stay_the_same_over_versions():
    """Philox4x64-10 with key (20, 0) and counter (1, 0, 0, 0), from the definition of the generator."""
    assert rng.bits(4, 20, rng.SAMPLE, 0).tolist() == philox((20, 0), (1, 0, 0, 0))
    assert rng.bits(4, 7, rng.AUGMENT, 3, 12).tolist() == philox((7, 2), (1, 3, 12, 0))


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Salmon et al., 2011: ten rounds of two multiplications, and a key that grows by constants."""
    mask = 2**64 - 1
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & mask, (left >> 64) ^ c3 ^ k1, left & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]
