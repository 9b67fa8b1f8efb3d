"""Whether stacked layers give what a user's module gives: tried before a run relies on them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..support.errors import first_line
from ..support.randomness import Draws
from ..support.user_code import users_code
from .form import Stored, each
from .network import Network
from .parameters import dense, outputs_with, tensors, tied, while_holding

CLIENTS, IMAGES = 2, 2
DOUBLE = 2_000_000  # numbers of a model up to which double precision is tried; beyond, it would take too much memory
CLOSE = {torch.float64: 1e-8, torch.float32: 1e-2}  # of a tensor's norm
NEGLIGIBLE = {torch.float64: 1e-10, torch.float32: 1e-5}


def disagreement(network: Network) -> str:
    """In what the stacked forward differs from the module.

    Sets whether its layers draw random numbers, and which parameters a backward pass reaches.
    """
    size = sum(value.numel() for value in tensors(network.module).values())
    dtype = torch.float64 if size <= DOUBLE else torch.float32
    draw = torch.Generator().manual_seed(0)
    images = network.form.random(CLIENTS, IMAGES, draw=draw, dtype=dtype)
    keys = torch.arange(CLIENTS)
    values = torch.stack([perturbed(network, dtype, draw) for _ in range(CLIENTS)])
    try:
        logits, grads, network.draws = _stacked(network, values, images, keys)
        evaluated = _evaluated(network, values, images)
    except Exception as error:  # of torch's own operations on shapes that they do not take
        return f"its stacked layers fail: {first_line(error)}"
    module = copy.deepcopy(network.module).to(dtype)
    for client, row in enumerate(values):
        state, own = network.layout.unpack(row), each(images, lambda value, of=client: value[of])
        with _hooks_noted() as hooks:
            expected, gradient = _plain(network, module, state, own, keys[client : client + 1])
        if hooks:
            return "it has hooks on gradients, set in its forward pass"
        for name, value in network.layout.unpack(grads[client]).items():
            if not _close(value, gradient[name]):
                return f"the gradient of {name} on stacked layers is not that of the module"
        evaluation = _call(network, module, state, own, training=False)
        if not _close(logits[client], expected) or not _close(evaluated[client], evaluation):
            return "the outputs on stacked layers are not those of the module"
    return ""


_noting = threading.Lock()  # others would restore what they have found


@contextmanager
def _hooks_noted() -> Iterator[list[Tensor]]:
    """The tensors on which this thread sets hooks: a trace has none, and they may act on other gradients only."""
    noted, thread = list[Tensor](), threading.get_ident()

    def registering(self: Tensor, hook: Any) -> Any:
        if threading.get_ident() == thread:
            noted.append(self)
        return register(self, hook)

    patched: Any = Tensor
    with _noting:
        register = Tensor.register_hook
        patched.register_hook = registering
        try:
            yield noted
        finally:
            patched.register_hook = register


def perturbed(network: Network, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Other parameters for every client, so that a mix-up is seen."""
    state = network.layout.unpack(network.initial(dtype))
    noisy = {n: v + 0.01 * torch.randn(v.shape, generator=draw, dtype=dtype) for n, v in state.items()}
    return network.layout.pack(noisy, dtype)


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= CLOSE[a.dtype] * b.norm() + NEGLIGIBLE[a.dtype])


def _loss(logits: Tensor) -> Tensor:
    """Any smooth function in which all outputs count."""
    return (logits.log_softmax(-1)[..., 0] + 0.1 * logits.square().sum(-1)).sum()


def _stacked(network: Network, values: Tensor, images: Stored, keys: Tensor) -> tuple[Tensor, Tensor, bool]:
    assert network.forward is not None
    grads = torch.zeros_like(values)  # the gradient-free parts stay zero
    places = {entry.name: entry.live(grads).fill_(torch.nan) for entry in network.layout.entries}
    stack = network.stack(values, grads)
    stack.draws = Draws(keys, stacked=True)
    with torch.enable_grad():
        logits = network.forward(stack, images)
        _loss(logits).backward()
    for name, place in places.items():
        if place.isnan().all():
            network.forward.used.discard(name)
            place.zero_()
    return logits.detach(), grads, stack.draws.count > 0


@torch.no_grad()
def _evaluated(network: Network, values: Tensor, images: Stored) -> Tensor:
    assert network.forward is not None
    clients = ((v[None], each(images, lambda i, of=c: i[of : of + 1])) for c, v in enumerate(values))
    return torch.cat([network.forward(network.stack(v), own) for v, own in clients])


def _call(network: Network, module: nn.Module, state: dict[str, Tensor], images: Stored, training: bool) -> Tensor:
    with torch.set_grad_enabled(training):
        return outputs_with(module.train(training), {**tensors(module), **state}, tied(module), network.form, images)


def _plain(
    network: Network, module: nn.Module, state: dict[str, Tensor], images: Stored, key: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: value.requires_grad_() for name, value in state.items()}

    def passes() -> tuple[Tensor, tuple[Tensor, ...]]:
        logits, every = _call(network, module, leaves, images, training=True), list(leaves.values())
        return logits, torch.autograd.grad(_loss(logits), every, allow_unused=True, materialize_grads=True)

    expected = "a model that autograd can differentiate"
    with torch.enable_grad(), Draws(key, stacked=False), users_code(f"--model {network.name}", expected):
        logits, gradients = while_holding(module, {**tensors(module), **leaves}, tied(module), passes)
    return logits.detach(), dict(zip(leaves, map(dense, gradients), strict=True))
