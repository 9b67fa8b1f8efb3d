"""Activations that become part of the norm before them, and sums that become part of the norm behind them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from stacked_checks import check_stacked
from torch import nn

from fedlada_mpi.models import added_norm
from fedlada_mpi.tasks import About, Array


class Activated(nn.Module):
    """An activation between a norm, whose outputs are on both sides of its limits, and another operation."""

    def __init__(self, activation):
        super().__init__()
        self.norm, self.activation = nn.GroupNorm(2, 4), activation
        nn.init.constant_(self.norm.weight, 6.0)

    def forward(self, x):
        return self.activation(self.norm(x)).mean((2, 3))


def steps(activation) -> int:
    network = check_stacked(Activated(activation), About(Array("float32", (4, 5, 6))))
    return len(network.forward.training.steps)


@pytest.mark.parametrize(
    ("activation", "joins"),
    [
        (nn.ReLU(), True),
        (nn.ReLU6(), True),
        (lambda x: F.relu6(x), True),
        (lambda x: F.hardtanh(x, max_val=6.0, min_val=0.0), True),
        (nn.Hardtanh(0, 5), False),
        (nn.Hardtanh(), False),
        (nn.SiLU(), False),
    ],
)
def test_which_activations_join_the_norm_before_them(activation, joins):
    assert steps(activation) - steps(lambda x: x) == (not joins)


def test_relu6_of_a_norm_and_its_residual():
    class Residual(Activated):
        def forward(self, x):
            return self.activation(self.norm(x) + 3 * x).mean((2, 3))

    torch.manual_seed(0)
    check_stacked(Residual(nn.ReLU6()), About(Array("float32", (4, 5, 6))))


class Sums(nn.Module):
    """A sum that is used besides its norm, and one that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.LayerNorm(6), nn.LayerNorm(6, bias=False), nn.LayerNorm(6)

    def forward(self, x):
        y = self.first(x)
        total = x + y
        return self.third(self.second(total) + total * y)


def test_a_sum_and_its_trained_norm_are_one_step(monkeypatch):
    met, step = [], added_norm.added_trained
    monkeypatch.setattr(added_norm, "added_trained", lambda *given: met.append(True) or step(*given))
    torch.manual_seed(0)
    network = check_stacked(Sums(), About(Array("float32", (5, 6))))
    assert met
    met.clear()
    network.forward(network.stack(network.initial().expand(2, -1)), torch.randn(2, 3, 5, 6))
    assert len(met) == 2
