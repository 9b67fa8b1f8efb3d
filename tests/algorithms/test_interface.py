"""What the interface offers to methods, beyond what the built-in ones use together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training_runs import make_data, run_here

from fedlada_mpi import algorithms
from fedlada_mpi.algorithms import Algorithm

SIZES = [4, 9, 6, 3, 8]
COMMON = dict(rounds=3, local_steps=2, participation=0.6, lr=0.1, precision="fp64", eval_every=1)


class Probe(Algorithm):
    """FedAvg that also sends each client's number of images, and keeps the means of what arrived."""

    name = "probe"
    scalars = ("even", "weighted")
    uniform = ("offset", "even")
    step_index = True
    seen: list[tuple[float, float]] = []
    indices: list[list[float]] = []

    def direction(self, c, s, g):
        Probe.indices.append(c.k.flatten().tolist())
        return g

    def finish(self, c, s, r):
        number = c.x[:, :1].clone() * 0 + torch.arange(1.0, len(c.x) + 1).unsqueeze(1)
        return {**super().finish(c, s, r), "even": number * 0 + 2, "weighted": number * 0 + 3}

    def server(self, s, mean, r):
        Probe.seen.append((mean["even"].item(), mean["weighted"].item()))
        super().server(s, mean, r)


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.setitem(algorithms._built_in(), "probe", Probe)
    Probe.seen.clear()
    Probe.indices.clear()


@pytest.mark.ranks
def test_equal_weights_for_some_quantities(probe, shared_tmp):
    """The offset is averaged with equal weights although --weighting is size: FedAvg's result without it."""
    data = make_data(shared_tmp / "interface", SIZES, silos=2)
    mine = run_here(data, shared_tmp / "probe", algorithm="probe", weighting="size", **COMMON)
    plain = run_here(data, shared_tmp / "plain", algorithm="fedavg", **COMMON)
    np.testing.assert_allclose(mine.x, plain.x, rtol=1e-12)
    found, expected = ([record["consistency"] for record in run.metrics] for run in (mine, plain))
    assert found == pytest.approx(expected, rel=1e-9)
    assert all(pair == pytest.approx((2, 3), rel=1e-12) for pair in Probe.seen), "means of equal numbers"
    assert {k for row in Probe.indices for k in row} <= {0.0, 1.0}, "the index of the local step"


def test_a_coin_is_the_same_for_all_and_different_for_each_round():
    from fedlada_mpi.algorithms import resolve

    one, two, other = (algorithms.create(resolve({"algorithm": "fedavg", "seed": seed}).config) for seed in (1, 1, 2))
    coins = [one.coin(t) for t in range(200)]
    assert coins == [two.coin(t) for t in range(200)]
    assert coins != [other.coin(t) for t in range(200)]
    assert len(set(coins)) == 200
    assert abs(np.mean(coins) - 0.5) < 0.1
