"""Whether all numbers of a vector are finite, also where their squares are not."""

from __future__ import annotations

import pytest
import torch

from fedlada_mpi.rounds.vectors import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_numbers_are_finite(dtype):
    large = torch.full((5,), torch.finfo(dtype).max, dtype=dtype) / (1 if dtype == torch.float32 else 1e160)
    assert is_finite(large)
    assert is_finite(torch.zeros(5, dtype=dtype))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_that_is_not(bad):
    vector = torch.ones(100)
    vector[41] = bad
    assert not is_finite(vector)
