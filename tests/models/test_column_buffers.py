"""Columns on kept buffers: the bits of those that are made anew."""

from __future__ import annotations

import pytest
import torch

from fedlada_mpi.models.columns import ColumnBuffers, Window, col2im, im2col

WINDOWS = {
    "padded": Window(4, 5, (3, 3), (1, 1), (1, 1)),
    "strided": Window(8, 7, (3, 3), (2, 2), (1, 1)),
    "border without taps": Window(7, 7, (2, 2), (3, 3)),
    "dead taps": Window(1, 2, (3, 3), (1, 1), (1, 1)),
    "one row": Window(1, 9, (1, 4), (2, 2), (0, 2)),
    "whole map": Window(4, 5, (4, 5)),
    "whole rows": Window(4, 5, (2, 5)),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_of_columns_and_maps(name, dtype):
    """Also where the buffers have been used before."""
    window, draw = WINDOWS[name], torch.Generator().manual_seed(0)
    (r0, r1), (c0, c1) = window.taps
    shape = torch.Size((2, 3, window.rows, window.columns, 5))
    buffers = ColumnBuffers(window, shape, torch.zeros((), dtype=dtype))
    used = (r1 - r0) * (c1 - c0) * 5
    for width in (used, used + 11, used):
        x = torch.randn(shape, generator=draw).to(dtype)
        expected = im2col(x, window, width)
        assert torch.equal(buffers.im2col(x, width), expected)
        cols = torch.randn(expected.shape, generator=draw).to(dtype)
        maps = buffers.col2im(cols)
        assert torch.equal(maps, col2im(cols, window, shape))
        assert maps.is_contiguous()


@pytest.mark.parametrize("name", WINDOWS)
def test_columns_are_not_the_buffers(name):
    """Another layer with the same window overwrites these before the backward pass reads the columns."""
    window = WINDOWS[name]
    x = torch.ones(1, 1, window.rows, window.columns, 2)
    (r0, r1), (c0, c1) = window.taps
    buffers, width = ColumnBuffers(window, x.shape, x), (r1 - r0) * (c1 - c0) * 2
    first = buffers.im2col(x, width)
    before = first.clone()
    buffers.im2col(2 * x, width)
    assert torch.equal(first, before)


def test_results_are_not_the_buffers():
    window, x = WINDOWS["padded"], torch.ones(1, 1, 4, 5, 2)
    buffers = ColumnBuffers(window, x.shape, x)
    for width in (18, 32):
        first = buffers.im2col(x, width)
        before = first.clone()
        buffers.im2col(2 * x, width)
        assert torch.equal(first, before)
    map_ = buffers.col2im(torch.ones(1, 20, 18))
    assert map_[0, 0, 1, 1].tolist() == [9.0, 9.0]
    buffers.col2im(torch.zeros(1, 20, 18))
    assert map_[0, 0, 1, 1].tolist() == [9.0, 9.0]
