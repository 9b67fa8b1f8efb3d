"""RNN, GRU and LSTM of all clients at once.

The inputs' products of all steps are one product, and so are the gradients of the weights; each step then has one
batched product of the states with the weights of all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .by_autograd import linear

Drop = Callable[[Tensor], Tensor]
GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}


class _Addend(torch.autograd.Function):
    """What is added to the states' products of all steps; its gradient is theirs, and so gives that of the weight."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, weight: Tensor, states: list[Tensor]) -> Tensor:
        ctx.states = states
        return addend.view_as(addend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Of [C, N, T, gates], with the states before each step, filled in by the forward pass."""
        dweight = None
        if ctx.needs_input_grad[1]:
            states = torch.stack(ctx.states, 2).flatten(1, 2)
            dweight = torch.bmm(gradient.flatten(1, 2).mT, states)
        return gradient, dweight, None


def _one_direction(
    mode: str, x: Tensor, parameters: Mapping[str, Tensor], name: str, h: Tensor, c: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of x [C, N, T, in] from the states h (and c) [C, N, size]: all outputs, and the last states."""
    count = len(x)
    weight = parameters[f"weight_hh_{name}"].expand(count, -1, -1)
    bias = parameters.get(f"bias_hh_{name}")
    given = linear(x, parameters[f"weight_ih_{name}"], parameters.get(f"bias_ih_{name}"))
    if mode == "GRU":  # whose candidate scales the states' product
        added = torch.zeros_like(given[:1, :1, :1, :1]) if bias is None else bias.view(len(bias), 1, 1, -1)
        added = added.expand(given.shape)
    else:
        added = given if bias is None else given + bias.view(len(bias), 1, 1, -1)
    before: list[Tensor] = []
    added = _Addend.apply(added, weight, before)
    fixed = weight.detach().mT
    steps, inputs, outputs = added.unbind(2), given.unbind(2), [h] * x.shape[2]
    order = range(x.shape[2])
    for t in reversed(order) if backwards else order:
        before.append(h.detach())
        product = torch.baddbmm(steps[t], h, fixed)
        if mode == "LSTM":
            i, f, g, o = product.chunk(4, -1)
            assert c is not None
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        elif mode == "GRU":
            (xr, xz, xn), (hr, hz, hn) = inputs[t].chunk(3, -1), product.chunk(3, -1)
            z = torch.sigmoid(xz + hz)
            n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
            h = n + z * (h - n)
        else:
            h = torch.tanh(product) if mode == "RNN_TANH" else torch.relu(product)
        outputs[t] = h
    if backwards:
        before.reverse()
    return torch.stack(outputs, 2), h, c


# On a CPU, weights of more bytes per client than this stay in its cache only if clients run one after another.
LARGE = 1 << 17


def _by_library(
    layer: nn.RNNBase, x: Tensor, parameters: Mapping[str, Tensor], names: Sequence[str], h: Tensor, c: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All directions of one layer by torch's own function, for every client in turn."""
    kinds = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if layer.bias else ()))
    weights = [parameters[f"{kind}_{name}"] for name in names for kind in kinds]
    by_client = zip(*(weight.expand(len(x), *weight.shape[1:]).unbind(0) for weight in weights), strict=True)
    run, training = getattr(torch._VF, layer.mode.lower()), torch.is_grad_enabled()
    found = []
    for client, own in enumerate(by_client):
        initial = h[client] if c is None else (h[client], c[client])
        found.append(run(x[client], initial, list(own), layer.bias, 1, 0.0, training, layer.bidirectional, True))
    out, last, *cells = (torch.stack(parts) for parts in zip(*found, strict=True))
    return out, last, cells[0] if cells else None


def recurrent(
    layer: nn.RNNBase, parameters: Mapping[str, Tensor], x: Tensor, initial: Any, drop: Drop, on_gpu: bool
) -> tuple[Tensor, Any]:
    """What ``layer`` gives for x [C, N, T, in], or [C, T, N, in]; parameters are [C, ...], or [1, ...] if frozen."""
    x = x if layer.batch_first else x.transpose(1, 2)
    directions = 2 if layer.bidirectional else 1
    lstm = layer.mode == "LSTM"
    if initial is None:
        zeros = x.new_zeros(len(x), layer.num_layers * directions, x.shape[1], layer.hidden_size)
        initial = (zeros, zeros) if lstm else zeros
    h0, c0 = initial if lstm else (initial, None)
    last: list[Tensor] = []
    cells: list[Tensor] = []
    large = parameters["weight_hh_l0"][0].nbytes > LARGE and not on_gpu
    for depth in range(layer.num_layers):
        outputs = []
        if large:
            places = slice(depth * directions, (depth + 1) * directions)
            names = [f"l{depth}{'_reverse' * direction}" for direction in range(directions)]
            given = (h0[:, places], None if c0 is None else c0[:, places])
            x, h, c = _by_library(layer, x, parameters, names, *given)
            last += h.unbind(1)
            cells += [] if c is None else c.unbind(1)
            x = drop(x) if depth < layer.num_layers - 1 else x
            continue
        for direction in range(directions):
            place, name = depth * directions + direction, f"l{depth}{'_reverse' * direction}"
            c = None if c0 is None else c0[:, place]
            out, h, c = _one_direction(layer.mode, x, parameters, name, h0[:, place], c, bool(direction))
            outputs.append(out)
            last.append(h)
            if c is not None:
                cells.append(c)
        x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
        if depth < layer.num_layers - 1:
            x = drop(x)
    out = x if layer.batch_first else x.transpose(1, 2)
    states = torch.stack(last, 1)
    return out, (states, torch.stack(cells, 1)) if lstm else states
