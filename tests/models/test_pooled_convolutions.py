"""A convolution with the pooling behind it: the bits of convolution, ReLU and pooling one after another."""

from __future__ import annotations

import pytest
import torch
from stacked_checks import built, check_stacked
from torch import nn

from fedlada_mpi.models import layers, library_convolution
from fedlada_mpi.models.columns import Window
from fedlada_mpi.tasks import About, Array

CHANNELS, OUT, IMAGES = 3, 4, 2
MAP = About(Array("float32", (CHANNELS, 6, 7)))


def results(clients: int, rectify: bool, joined: bool) -> list[torch.Tensor]:
    """Outputs and the gradients of the input and of all parameters."""
    draw = torch.Generator().manual_seed(1)
    network = built(nn.Conv2d(CHANNELS, OUT, 3, padding=1), MAP)
    weight, bias = (entry.name for entry in network.layout.entries)
    values = torch.randn(clients, network.layout.size, generator=draw) * network.layout.real
    x = torch.randn(clients, IMAGES, 6, 7, CHANNELS, generator=draw).requires_grad_()
    stack, window = network.stack(values, grads := torch.zeros_like(values)), Window(6, 7, (3, 3), (1, 1), (1, 1))
    about = (stack, x, weight, bias, window, 1, "relu" if rectify else "")
    pool = (3, 2, 1)
    out = layers.pooled_conv(*about, pool) if joined else layers.max_pool(stack, layers.conv(*about), *pool)
    out.backward(torch.randn(out.shape, generator=draw))
    assert x.grad is not None
    return [out.detach(), x.grad, grads]


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("rectify", [True, False])
@pytest.mark.parametrize("by_library", [True, False])
def test_bits(monkeypatch, clients, rectify, by_library):
    if by_library:
        monkeypatch.setattr(library_convolution, "LARGE", 0)
    apart = results(clients, rectify, joined=False)
    assert all(torch.equal(a, b) for a, b in zip(apart, results(clients, rectify, joined=True), strict=True))
    assert all(bool(value.any()) for value in apart)


class Twice(nn.Module):
    """What is pooled has another use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(CHANNELS, OUT, 3), nn.MaxPool2d(2)

    def forward(self, x):
        whole = self.conv(x).relu()
        return self.pool(whole).flatten(1).sum(1, keepdim=True) * whole.mean((2, 3))


def test_a_map_that_is_also_used_elsewhere():
    check_stacked(Twice(), MAP)
