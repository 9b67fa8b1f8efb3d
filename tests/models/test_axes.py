"""Axes are read in another way without a copy, wherever memory allows it."""

import pytest
import torch

from fedlada_mpi.models.axes import Axes

MAP = Axes.channels_last(6, 2, 5)


@pytest.mark.parametrize(
    ("shape", "regrouped"),
    [
        ((60,), Axes((6, 2, 5), (3,), (1, 2, 0))),
        ((6, 10), Axes((6, 2, 5), (1, 2), (1, 2, 0))),
        ((3, 2, 2, 5), Axes((3, 2, 2, 5), (1, 1, 1, 1), (2, 3, 0, 1))),
        ((6, 1, 2, 5), Axes((6, 1, 2, 5), (1, 1, 1, 1), (2, 3, 0, 1))),
        ((4, 15), None),  # across channels and rows
        ((6, 2, 4), None),  # another number of elements
    ],
)
def test_regrouped(shape, regrouped):
    assert MAP.regrouped(shape) == regrouped


@pytest.mark.parametrize("shape", [(60,), (6, 10), (3, 2, 2, 5), (6, 1, 2, 5)])
def test_seen_as_torch_would_reshape(shape):
    seen = torch.arange(120).reshape(1, 2, 6, 2, 5)
    stored = seen.permute(0, 1, 3, 4, 2).contiguous()
    axes = MAP.regrouped(shape)
    assert torch.equal(axes.as_seen(stored.view(1, 2, *axes.stored)), seen.reshape(1, 2, *shape))
