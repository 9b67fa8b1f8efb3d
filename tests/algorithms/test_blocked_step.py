"""Local training in blocks: the bits of the whole, whatever is clipped."""

from __future__ import annotations

import pytest
import torch

from fedlada_mpi import algorithms
from fedlada_mpi.algorithms import ClientVectors, Round, Vectors, blocked_step, resolve
from fedlada_mpi.algorithms.step import local_step

SIZE = 5 * 64 + 64
LR = torch.tensor(0.1)


def vectors(a, clients: int, scale: float) -> tuple[ClientVectors, Vectors]:
    draw = torch.Generator().manual_seed(2)
    s = Vectors(**{name: torch.rand(SIZE, generator=draw) for name in (*a.down, *a.derived)})
    names = ("x", *a.slots, *a.client_state)
    c = ClientVectors(**{name: torch.rand(clients, SIZE, generator=draw) for name in names})
    c.g = scale * torch.randn(clients, SIZE, generator=draw)
    c.steps, c.k, c.compute_copy = torch.full((clients, 1), 3.0), torch.ones(clients, 1), None
    return c, s


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fedcm", "fedlada", "localadam", "fedadc"])
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("scale", [1e-3, 1.0], ids=["far below the clip", "above it"])
def test_bits(monkeypatch, method, clients, scale):
    monkeypatch.setattr(blocked_step, "BLOCK", 2 * 64 * clients)
    a = algorithms.create(resolve({"algorithm": method, "clip": 5.0, "weight_decay": 0.01}).config)
    assert blocked_step.is_elementwise(a)
    (whole, s), (blocked, other) = (vectors(a, clients, scale) for _ in range(2))
    step = blocked_step.BlockedStep()
    for _ in range(2):
        local_step(a, whole, s, LR, False, False)
        step(a, blocked, other, LR, False, False)
    assert {name for name in vars(whole) if name not in ("compute_copy",)} == set(vars(blocked)) - {"compute_copy"}
    for name in ("x", *a.slots):
        assert torch.equal(getattr(whole, name), getattr(blocked, name)), name


@pytest.mark.parametrize("method", sorted(set(algorithms.names()) - {"fedlamb"}))
def test_bits_of_the_beginning(monkeypatch, method):
    monkeypatch.setattr(blocked_step, "BLOCK", 2 * 64 * 3)
    a = algorithms.create(resolve({"algorithm": method}).config)
    assert blocked_step.is_elementwise(a)
    (whole, s), (blocked, other) = (vectors(a, 3, 1.0) for _ in range(2))
    a.begin(whole, s, Round(2, 0.1, 3.0, 3.0, 10))
    blocked_step.begin(a, blocked, other, Round(2, 0.1, 3.0, 3.0, 10))
    for name in ("x", *a.slots, *a.client_state):
        assert torch.equal(getattr(whole, name), getattr(blocked, name)), name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(monkeypatch, bad):
    """As in the whole step, they reach every element of their client."""
    monkeypatch.setattr(blocked_step, "BLOCK", 128)
    a = algorithms.create(resolve({"algorithm": "fedavg", "clip": 5.0}).config)
    (whole, s), (blocked, other) = (vectors(a, 2, 1e-3) for _ in range(2))
    whole.g[0, 7] = blocked.g[0, 7] = bad
    local_step(a, whole, s, LR, False, False)
    blocked_step.BlockedStep()(a, blocked, other, LR, False, False)
    torch.testing.assert_close(whole.x, blocked.x, rtol=0, atol=0, equal_nan=True)
    assert blocked.x[1].isfinite().all()
    assert blocked.x[0].isnan().any()


def test_norms_of_single_tensors_are_not_blocked():
    assert not blocked_step.is_elementwise(algorithms.create(resolve({"algorithm": "fedlamb"}).config))
