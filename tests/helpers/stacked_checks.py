"""Whether a module runs on stacked layers alone, and gives there what it gives by itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlada_mpi import models
from fedlada_mpi.models.form import each
from fedlada_mpi.support.randomness import Draws
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks import About

CLIENTS, EXAMPLES = 3, 4


def built(module: nn.Module, about: About, outputs: tuple[int, ...] | None = None) -> models.Network:
    """The network of a module, which has a stacked forward without an operation under vmap."""
    return stacked_alone(models.build(Given(module), outputs, about))


def stacked_alone(network: models.Network) -> models.Network:
    """The network, if it has a stacked forward without an operation under vmap."""
    assert not network.untraceable_because, network.untraceable_because
    vmapped = (network.forward.training.vmapped, network.forward.evaluation.vmapped)
    assert vmapped == ([], []), vmapped
    return network


def check_stacked(module: nn.Module, about: About, inputs=None, close: float = 1e-12) -> models.Network:
    """Outputs and gradients of clients in float64; the last example of a client is padding, and has no weight."""
    return check_network(built(module, about), inputs, close)


def check_network(network: models.Network, inputs=None, close: float = 1e-12) -> models.Network:
    """As ``check_stacked``, of a network that is there already."""
    stacked_alone(network)
    module, draw = network.module, torch.Generator().manual_seed(1)
    if inputs is None:
        inputs = network.form.random(CLIENTS, EXAMPLES, draw=draw, dtype=torch.float64)
    state = {name: p.detach().double() for name, p in module.named_parameters() if p.requires_grad}
    states = [{n: v + 0.1 * torch.randn(v.shape, generator=draw) for n, v in state.items()} for _ in range(CLIENTS)]
    values = torch.stack([network.layout.pack(s, torch.float64) for s in states])
    grads = torch.zeros_like(values)
    keys = torch.arange(10, 10 + CLIENTS)
    stack = network.stack(values, grads)
    stack.draws = Draws(keys, stacked=True)
    outputs = network.forward(stack, inputs)
    factor = torch.randn(outputs.shape[2:], generator=draw, dtype=torch.float64)
    loss_of(outputs[:, :-1], factor).backward()
    evaluated = network.forward(network.stack(values[:1]), each(inputs, lambda value: value[:1]))
    plain = copy.deepcopy(network.module).double()
    for client in range(CLIENTS):
        own = each(inputs, lambda value, of=client: value[of])
        leaves = {name: value.clone().requires_grad_() for name, value in states[client].items()}
        with Draws(keys[client : client + 1], stacked=False):
            expected = called(plain.train(), leaves, network, own)
        assert_close(outputs[client], expected, close)
        loss_of(expected[:-1], factor).backward()
        for name, found in network.layout.unpack(grads[client]).items():
            wanted = leaves[name].grad
            assert_close(found, torch.zeros_like(found) if wanted is None else wanted, close, name)
        if client == 0:
            assert_close(evaluated[0], called(plain.eval(), leaves, network, own), close)
    return network


def called(module: nn.Module, state: dict[str, Tensor], network: models.Network, own) -> Tensor:
    arguments, named = network.form.seen(own)
    return functional_call(module, state, arguments, named)


def loss_of(outputs: Tensor, factor: Tensor) -> Tensor:
    return (torch.tanh(outputs) * factor).sum()


def assert_close(found: Tensor, wanted: Tensor, close: float, name: str = "outputs") -> None:
    found, wanted = found.detach(), wanted.detach()
    scale = max(float(wanted.abs().max()), 1.0)
    assert float((found - wanted).abs().max()) <= close * scale, name
