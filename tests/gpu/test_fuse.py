"""The fused step against the step as written: everything it translates, and everything it must leave alone.

On a CUDA device directly; elsewhere ``test_kernels.py`` runs this file in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import operator

import numpy as np
import pytest
import torch
from kernel_checks import DEVICE, agree, kernels_run, random

from fedlada_mpi import algorithms
from fedlada_mpi.algorithms import ClientVectors, Vectors, resolve
from fedlada_mpi.algorithms.base import RebindError
from fedlada_mpi.algorithms.dry_run import steps_alone
from fedlada_mpi.algorithms.step import local_step
from fedlada_mpi.gpu import fuse
from fedlada_mpi.gpu.fuse import Fused


def method(name: str, **changes) -> algorithms.Algorithm:
    settings = {"dataset": "cifar10", "algorithm": name, "clip": 1.0, "weight_decay": 0.1, **changes}
    return algorithms.create(resolve(settings).config)


METHODS = [name for name in algorithms.names() if method(name).fusable]
STEPS = [(name, False, {}) for name in METHODS]
STEPS += [(name, True, {}) for name in METHODS if steps_alone(method(name))]
READINGS = (
    dict(bias_correction=True),
    dict(v_max=False, v_init="server", eps=1e-3),
    dict(v_init="fresh", eps=1e-3, bias_correction=True, correct_after_max=True),
    dict(decay_mode="inside"),
    dict(decay_on="weights"),
    dict(decay_on="weights", decay_mode="l2"),
)
STEPS += [("fedlada", gradient_free, reading) for gradient_free in (False, True) for reading in READINGS]


@kernels_run
@pytest.mark.filterwarnings("error:.*cannot be fused")
@pytest.mark.parametrize(("name", "gradient_free", "changes"), STEPS, ids=str)
def test_fused_step(name, gradient_free, changes, monkeypatch):
    """The kernel made from a method's code does what the code does; twice, as the state moves on."""
    monkeypatch.setattr(fuse, "PARTS", 4)
    chosen = method(name, **changes)
    clients = {n: random(3, 3000).abs() for n in ("x", *chosen.slots, *chosen.client_state)} | {"g": random(3, 3000)}
    clients |= {n: torch.tensor([[4.0], [2.0], [3.0]], device=DEVICE) for n in ("steps", "k")}
    clients |= {"g1": random(3, 3000)} if chosen.gradients == 2 else {}
    s = Vectors(**{n: random(3000).abs() for n in (*chosen.down, *chosen.derived)}, decays=(random(3000) > 0).float())
    lr = torch.tensor(0.1, device=DEVICE)
    fused, plain = (ClientVectors(**{n: v.clone() for n, v in clients.items()}, compute_copy=None) for _ in range(2))
    step = Fused(local_step)
    for _ in range(2):
        step(chosen, fused, s, lr, gradient_free, True)
        local_step(chosen, plain, s, lr, gradient_free, True)
    for n in clients:
        agree(getattr(fused, n), getattr(plain, n))


@kernels_run
@pytest.mark.parametrize(("name", "changes"), [(name, more) for name, free, more in STEPS if free], ids=str)
def test_many_steps_of_gradient_free_parameters_are_those_of_single_ones(name, changes):
    chosen = method(name, **changes)
    clients = {n: random(2, 3000).abs() for n in ("x", *chosen.slots, *chosen.client_state)}
    clients |= {n: torch.tensor([[7.0], [3.0]], device=DEVICE) for n in ("steps", "k")}
    clients |= {"g1": torch.zeros(2, 3000, device=DEVICE)} if chosen.gradients == 2 else {}
    s = Vectors(**{n: random(3000).abs() for n in (*chosen.down, *chosen.derived)}, decays=(random(3000) > 0).float())
    lr = torch.tensor(0.01, device=DEVICE)
    once, singly = (ClientVectors(**{n: v.clone() for n, v in clients.items()}, compute_copy=None) for _ in range(2))
    step = Fused(local_step)
    assert step.repeats(chosen, once, s)
    step.repeat(chosen, once, s, lr, 7)
    for _ in range(7):
        step(chosen, singly, s, lr, True, True)
        singly.k.add_(1)
    once.k.add_(7)
    for n in clients:
        assert torch.equal(getattr(once, n), getattr(singly, n)), n


def test_a_step_that_cannot_be_fused_warns_and_runs_as_written():
    def step(algorithm, c, s, lr, gradient_free, preserve_g):
        c.x.sub_(c.g.cumsum(1))

    c = ClientVectors(x=torch.zeros(1, 3), g=torch.ones(1, 3), compute_copy=None)
    fused, method = Fused(step), algorithms.create(resolve({}).config)
    with pytest.warns(UserWarning, match="cumsum cannot be fused"):
        fused(method, c, Vectors(x=torch.zeros(3)), torch.tensor(0.1), False, True)
    fused(method, c, Vectors(x=torch.zeros(3)), torch.tensor(0.1), False, True)
    assert c.x.tolist() == [[-2, -4, -6]]


# Everything that the fused step translates, as a method might write it; g is the gradient, h a vector of the server.
FUSABLE = {
    "mul_": lambda c, g, h: c.m.mul_(0.9),
    "add_ with alpha": lambda c, g, h: c.m.add_(g, alpha=0.1),
    "sub_": lambda c, g, h: c.v.sub_(h, alpha=0.5),
    "addcmul_": lambda c, g, h: c.v.addcmul_(g, g, value=0.01),
    "div_ by a number": lambda c, g, h: c.m.div_(4),
    "div_ by a vector": lambda c, g, h: c.m.div_(g * g + 1),
    "clamp_ to a vector": lambda c, g, h: c.v.clamp_(min=c.m),
    "clamp_ to numbers": lambda c, g, h: c.v.clamp_(min=-1, max=2),
    "copy_": lambda c, g, h: c.v.copy_(c.m),
    "*=": lambda c, g, h: setattr(c, "m", operator.imul(c.m, 0.9)),
    "+=": lambda c, g, h: setattr(c, "m", operator.iadd(c.m, g)),
    "-=": lambda c, g, h: setattr(c, "v", operator.isub(c.v, h)),
    "/=": lambda c, g, h: setattr(c, "v", operator.itruediv(c.v, 2)),
    "minus": lambda c, g, h: c.m.add_(-g),
    "square": lambda c, g, h: c.v.add_(g**2),
    "sqrt": lambda c, g, h: c.m.add_((g * g + 1).sqrt()),
    "power of a number": lambda c, g, h: c.m.mul_(1 - 0.9 ** (c.steps + 1)),
    "reflected": lambda c, g, h: c.m.add_(1 - 2 * g + 3 / (g * g + 1)),
    "sign_": lambda c, g, h: c.v.add_((c.m - g).sign_()),
    "a number of each client": lambda c, g, h: c.m.add_(h / c.steps),
    "g in place": lambda c, g, h: g.mul_(0.5).add_(c.x, alpha=0.1),
    "a copy of a vector that changes later": lambda c, g, h: (c.v.copy_(c.m), c.m.mul_(2), c.v.add_(c.m)),
}
UNFUSABLE = {
    "comparison": lambda c, g, h: c.m.mul_(g > 0),
    "equality": lambda c, g, h: c.m.add_(g == 0),
    "where": lambda c, g, h: c.m.copy_(torch.where(g > 0, g, h)),
    "condition": lambda c, g, h: c.m.add_(g) if (g * 0 == 0).all() else None,
    "cube": lambda c, g, h: c.m.add_(g**3),
    "abs": lambda c, g, h: c.m.add_(abs(g)),
    "another type": lambda c, g, h: c.m.copy_(g.to(torch.float64).sqrt().nan_to_num()),
    "indexing": lambda c, g, h: c.m[:, :5].zero_(),
    "a tensor from outside": lambda c, g, h: c.m.add_(g * torch.tensor(0.5)),
    "norm of another kind": lambda c, g, h: c.m.div_(1 + torch.linalg.vector_norm(g, 1, dim=1, keepdim=True)),
    "norm along clients": lambda c, g, h: c.m.div_(1 + torch.linalg.vector_norm(g, dim=0, keepdim=True)),
    "an infinite number": lambda c, g, h: c.m.clamp_(max=float("inf")),
}


def as_a_step(*operations):
    def step(algorithm, c, s, lr, gradient_free, preserve_g):
        g = c.g.to(c.x.dtype, copy=True)
        for operation in operations:
            operation(c, g, s.h)
        c.x.sub_((g + c.m).mul_(lr))

    return step


def fused_and_plain(step, warns: str | None = None) -> None:
    """Two steps, fused and as written, must agree."""
    clients = {n: random(2, 300) for n in ("x", "m", "v", "g")}
    clients["steps"] = torch.tensor([[2.0], [5.0]], device=DEVICE)
    s, lr = Vectors(h=random(300)), torch.tensor(0.1, device=DEVICE)
    fused, plain = (ClientVectors(**{n: v.clone() for n, v in clients.items()}) for _ in range(2))
    made, method = Fused(step), algorithms.create(resolve({}).config)
    with pytest.warns(UserWarning, match=warns) if warns else contextlib.nullcontext():
        made(method, fused, s, lr, False, True)
    made(method, fused, s, lr, False, True)
    for _ in range(2):
        step(method, plain, s, lr, False, True)
    for name in clients:
        agree(getattr(fused, name), getattr(plain, name))
        assert name == "g" or torch.isfinite(getattr(plain, name)).all()


@kernels_run
@pytest.mark.parametrize("name", FUSABLE)
def test_what_is_fused(name):
    fused_and_plain(as_a_step(FUSABLE[name]))


@kernels_run
@pytest.mark.parametrize("seed", range(12))
def test_generated_steps(seed):
    draw = np.random.default_rng(seed)
    fused_and_plain(as_a_step(*(FUSABLE[name] for name in draw.choice(list(FUSABLE), 6))))


@kernels_run
@pytest.mark.parametrize("name", UNFUSABLE)
def test_what_is_not_understood_runs_as_written(name):
    fused_and_plain(as_a_step(FUSABLE["*="], UNFUSABLE[name]), warns="cannot be fused; its steps run as written")


@kernels_run
def test_a_step_that_writes_to_the_server_fails_as_written():
    with pytest.warns(UserWarning, match="server's vectors cannot be fused"), pytest.raises(RuntimeError):
        fused_and_plain(as_a_step(lambda c, g, h: h.add_(g)))


@kernels_run
def test_binding_a_vector_to_another_tensor_is_refused():
    """As it would be lost in a captured step; fused or not."""
    step = as_a_step(lambda c, g, h: setattr(c, "m", 0.9 * c.m + g))
    with pytest.raises(RebindError, match=r"^m = \.\.\. does not update the vector m: write in place"):
        fused_and_plain(step)
    c = ClientVectors(**{n: torch.zeros(2, 3) for n in ("x", "m", "v", "g")})
    with pytest.raises(RebindError):
        step(None, c, Vectors(h=torch.zeros(3)), torch.tensor(0.1), False, True)
