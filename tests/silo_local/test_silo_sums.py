"""Means and deviations from whole numbers of several silos: by hand, and as data prepared together has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedlada_mpi.data.normalise import statistics
from fedlada_mpi.data.rows import Ragged
from fedlada_mpi.data.silos.sums import Sums, agree_statistics
from fedlada_mpi.data.sources import statistics as of_images
from fedlada_mpi.support.errors import UserError


def added(*silos: dict[str, Sums], image: bool = False):
    """As every rank has it, with masks that cancel: each silo adds what the next one subtracts."""
    random = np.random.default_rng(1)
    words = [np.concatenate([sums.words() for sums in silo.values()]) for silo in silos]
    masks = random.integers(-(2**63), 2**63 - 1, (len(silos), len(words[0])), dtype=np.int64)
    with np.errstate(over="ignore"):
        sent = [w + mask - masks[i - 1] for i, (w, mask) in enumerate(zip(words, masks, strict=True))]
        total = np.sum(sent, axis=0, dtype=np.int64)
    return agree_statistics(None, silos[0], lambda mine: total, image)


def test_by_hand():
    found = added({"": Sums.of(np.array([[1.0, -2.0], [3.0, -2.0]]), "")}, {"": Sums.of(np.array([[8.0, -2.0]]), "")})
    mean, std = found[""]
    assert mean == (4.0, -2.0)
    assert std == (pytest.approx(np.sqrt(26 / 3), rel=1e-8), 1.0)  # a constant column has none to divide by


def test_a_rank_without_data_adds_nothing():
    some = Sums.of(np.array([[0.5], [0.25]]), "")
    assert added({"a": some}, {"a": Sums.nothing(1)}) == added({"a": some})


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, st.tuples(st.integers(3, 30), st.integers(1, 3)),
              elements=st.floats(-1e6, 1e6, width=32)), st.integers(1, 2))  # fmt: skip
def test_as_data_prepared_together(table, cut):
    ours = added({"": Sums.of(table[:cut], "")}, {"": Sums.of(table[cut:], "")})[""]
    exact = table.astype(np.longdouble)
    np.testing.assert_allclose(ours[0], np.asarray(exact.mean(0), float), rtol=1e-8, atol=1e-12)
    deviation = np.asarray(exact.std(0), float)
    spread = deviation > 1e-6 * np.abs(table).max(0)  # else what single precision has left of a constant
    np.testing.assert_allclose(np.array(ours[1])[spread], deviation[spread], rtol=1e-7)


def test_the_digits_that_a_manifest_has():
    table = np.random.default_rng(0).normal(2000, 3, (500, 4)).astype(np.float32)
    mean, std = added({"": Sums.of(table[:123], "")}, {"": Sums.of(table[123:], "")})[""]
    assert ([*mean], [*std]) == statistics(table)


def test_pixels_give_the_same_bits():
    images = np.random.default_rng(0).integers(0, 256, (50, 3, 4, 3), dtype=np.uint8)
    images[..., 2] = 7
    found = added({"": Sums.of(images[:20], "")}, {"": Sums.of(images[20:], "")}, image=True)[""]
    assert found == of_images("npz", images)
    assert found[1][2] == 1.0


def test_rows_of_any_length_have_one_mean():
    rows = Ragged(np.array([[1.0], [2.0], [6.0]]), np.array([0, 1, 3]))
    assert added({"": Sums.of(rows, "")})[""][0] == (3.0,)


def test_the_largest_and_smallest_numbers():
    table = np.array([[2.0**64, 2.0**-140], [-(2.0**64), 2.0**-141]])
    mean, std = added(*[{"": Sums.of(table, "")}] * 3)[""]
    assert mean == (0.0, pytest.approx(0.75 * 2**-140, rel=1e-8))
    assert std == (pytest.approx(2.0**64, rel=1e-8), pytest.approx(2.0**-142, rel=1e-8))
    with pytest.raises(UserError, match=r"inputs: numbers beyond 2\^64"):
        Sums.of(table * 2, "inputs")
