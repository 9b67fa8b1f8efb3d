"""Values on the public grid: exact sums in any order, within 64 bits, against fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlada_mpi.privacy.grid import BITS, LARGEST, WORDS, NumberGrid, PublicGrid
from fedlada_mpi.support.words import joined, split

COMMON = settings(derandomize=True, deadline=None, max_examples=80, database=None)


def test_the_step_by_hand():
    assert PublicGrid(16, 10).step == 2.0**-54  # 2^4 * 2^4 / 2^62
    assert PublicGrid(2, 10).step == 2.0**-57
    assert PublicGrid(16, 1).step == 2.0**-58
    assert PublicGrid(10, 1).step == 2.0**-58  # a power of two for any range


@COMMON
@given(
    st.lists(st.tuples(st.floats(-16, 16, width=32), st.integers(1, 1000)), min_size=1, max_size=20),
    st.floats(-4, 4, width=32),
    st.randoms(use_true_random=False),
)
def test_sums_are_exact_in_any_order(values, base, random):
    grid = PublicGrid(32, 20_000)
    at = torch.tensor([base])
    totals = []
    for _ in range(2):
        random.shuffle(values)
        total = torch.zeros(1, dtype=torch.int64)
        for value, weight in values:
            assert int(grid.add(total, torch.tensor([value]), weight, at)) == 0
        totals.append(int(total))
    assert totals[0] == totals[1]
    exact = sum((Fraction(value) - Fraction(base)) * weight for value, weight in values)
    # Half a unit of rounding for each, and that of the product in double precision.
    allowed = len(values) * Fraction(grid.step) / 2 + sum(abs(Fraction(v - base)) * w for v, w in values) / 2**52
    assert abs(totals[0] * Fraction(grid.step) - exact) <= allowed


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sum_fits(sign):
    """All weight at the end of the range, beyond which values count as the end."""
    grid, total = PublicGrid(16, 1000), torch.zeros(2, dtype=torch.int64)
    clipped = sum(int(grid.add(total, sign * torch.tensor([16.0, 1e30]), 1.0)) for _ in range(1000))
    assert clipped == 1000
    assert total[0] == total[1]
    assert 2**61 < abs(int(total[0])) <= 2**BITS
    assert int(total[0]) * grid.step == sign * 16_000


def test_sums_wrap_around_what_is_there():
    """On top of a mask, modulo 2^64."""
    grid, mask = PublicGrid(16, 4), 2**63 - 5
    total = torch.tensor([mask])
    grid.add(total, torch.tensor([16.0]), 3.0)
    plain = torch.zeros(1, dtype=torch.int64)
    grid.add(plain, torch.tensor([16.0]), 3.0)
    assert (int(total) - mask) % 2**64 == int(plain) % 2**64


def test_sums_as_floats():
    """By hand, in several blocks: 3 and -5 units of 2^-58, and what float32 keeps of a large one."""
    grid, total = PublicGrid(16, 1), torch.tensor([3, -5, 2**60 + 1]).repeat(60_000)
    found = torch.empty(len(total))
    grid.decode(total, found)
    assert torch.equal(found, torch.tensor([3 * 2.0**-58, -5 * 2.0**-58, 4.0]).repeat(60_000))


def test_numbers_are_those_of_vectors():
    grid, random = NumberGrid(2.0**20, 50), np.random.default_rng(3)
    values, weights = random.normal(size=12) * 100, random.integers(1, 5, 12).astype(float)
    total = torch.zeros(1, dtype=torch.int64)
    for value, weight in zip(values, weights, strict=True):
        grid.add(total, torch.tensor([value]), weight)
    assert grid.whole(values, weights) == int(total)
    np.testing.assert_allclose(grid.real(int(total)), (values * weights).sum(), rtol=1e-10)


@COMMON
@given(st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=9), st.sampled_from([1e-3, 2.0**20, 2.0**32]))
def test_numbers_of_any_size(values, limit):
    """In words of several silos, one number each, with all of the weight that there may be."""
    grid = NumberGrid(limit, 2.0**31)
    words = np.sum([split(grid.whole(np.array([value])), WORDS) for value in values], 0)
    exact = sum(map(Fraction, values))
    assert abs(Fraction(joined(words.tolist())) * Fraction(grid.step) - exact) <= len(values) * Fraction(grid.step) / 2
    assert joined(split(grid.whole(np.array([LARGEST]), 2.0**31), WORDS)) * Fraction(grid.step) == 2**221
