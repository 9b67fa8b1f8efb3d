"""Norms and sums of large vectors, which a CPU takes block by block."""

from __future__ import annotations

import math

import pytest
import torch

from fedlada_mpi.rounds.vectors import BLOCK, add_weighted, is_finite, norm, quick_norm, quick_row_norms

SIZES = (0, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 77)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_norms_are_those_of_exact_sums(size, dtype):
    vector = drawn(size, dtype=dtype)
    expected = math.sqrt(math.fsum(value * value for value in vector.tolist()))
    assert norm(vector).dtype == torch.float64
    assert float(norm(vector)) == pytest.approx(expected, rel=1e-13, abs=0)
    assert quick_norm(vector).dtype == torch.float64
    assert float(quick_norm(vector)) == pytest.approx(expected, rel=1e-13 if size <= BLOCK else 3e-7, abs=0)


@pytest.mark.parametrize("value", [1e30, 1e-12, 1e-25, 1e-40])
def test_squares_beyond_float32(value):
    vector = torch.full((4 * BLOCK,), value)
    expected = float(vector[0]) * math.sqrt(4 * BLOCK)
    assert float(norm(vector)) == pytest.approx(expected, rel=1e-12, abs=0)
    assert float(quick_norm(vector)) == pytest.approx(expected, rel=3e-7, abs=0)
    vector[:BLOCK] = 1.0  # which the others do not change
    assert float(quick_norm(vector)) == pytest.approx(float(norm(vector)), rel=3e-7, abs=0)


@pytest.mark.parametrize("where", [0, BLOCK, -1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite(bad, where):
    vector = drawn(2 * BLOCK + 77)
    vector[where] = bad
    assert str(float(norm(vector))) == str(float(quick_norm(vector))) == str(bad)
    assert not is_finite(vector)


def test_the_bits_do_not_depend_on_threads_stacks_or_memory():
    rows = drawn(3, 2 * BLOCK + 77)
    shifted = torch.empty(rows[1].numel() + 1)[1:].copy_(rows[1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected, quick = norm(rows[1]), quick_norm(rows[1])
        torch.set_num_threads(2)
        found = [norm(shifted), norm(rows.T.contiguous().T[1])]
        found_quickly = [quick_row_norms(rows)[1], quick_norm(shifted)]
    finally:
        torch.set_num_threads(threads)
    assert [float(each) for each in found] == [float(expected)] * 2
    assert [float(each) for each in found_quickly] == [float(quick)] * 2


@pytest.mark.parametrize("size", SIZES)
def test_weighted_sums_are_those_of_whole_vectors(size):
    rows, weights = drawn(3, size), [7.0, 0.3, 111.0]
    total, expected = torch.ones(size), torch.ones(size)
    add_weighted(total, list(rows), weights)
    for row, weight in zip(rows, weights, strict=True):
        expected.add_(row, alpha=weight)
    assert torch.equal(total, expected)
