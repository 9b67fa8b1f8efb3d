"""Gradients that are given to autograd."""

from __future__ import annotations

import pytest
import torch

from fedlada_mpi.support import autograd


def test_gradients_are_those_of_torch():
    def leaves() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([0.5, -1.0, 4.0], requires_grad=True)

    given = [torch.tensor([1.0, 10.0, 100.0]), torch.tensor(7.0)]
    ours, theirs = leaves(), leaves()
    for (x, y), backward in ((ours, autograd.backward), (theirs, torch.autograd.backward)):
        backward([x * y, (x * x).sum()], given)
    assert ours[0].grad.tolist() == [0.5 + 14, -10 + 28, 400 + 42]
    assert ours[1].grad.tolist() == [1, 20, 300]
    assert all(torch.equal(mine.grad, right.grad) for mine, right in zip(ours, theirs, strict=True))


def test_gradients_of_another_shape_are_refused():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        autograd.backward([x * 2], [torch.ones(2)])
