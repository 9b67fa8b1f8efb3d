"""RNN, GRU and LSTM of all clients at once.

The inputs' products of all steps are one product, and so are the gradients of the weights; each step then has one
batched product of the states with the weights of all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .by_autograd import linear
from .cells import CellKernels, steps_of

Drop = Callable[[Tensor], Tensor]

# On a CPU, torch's own LSTM of one client after another is faster where a step's weights have more bytes than this.
LARGE = 1 << 15


class _Steps(torch.autograd.Function):
    """All steps of one direction, [C, T, N, size], and the last cells of an LSTM.

    ``product`` [C, T, N, gates] is what is added to the states' products, and becomes these; ``given``, for a GRU, are
    the inputs' products by themselves. Both must be nobody else's: their memory is written to.
    """

    @staticmethod
    def forward(
        ctx: Any, product: Tensor, given: Tensor | None, weight: Tensor, h: Tensor, c: Tensor | None, mode: str,
        backwards: bool, kernels: CellKernels | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        count, steps, rows, _ = product.shape
        states = product.new_empty(count, steps + 1, rows, h.shape[-1])
        first, last = (steps, 0) if backwards else (0, steps)
        states[:, first] = h
        buffers = [product, states]
        if c is not None:
            # Kernels keep in float32 what is added up over all steps.
            cells = torch.empty_like(states, dtype=None if kernels is None else torch.float32)
            cells[:, first] = c
            buffers.append(cells)
        if given is not None:
            buffers.append(given)
        step, _ = steps_of(mode, kernels)
        turned = weight.mT if product.is_cuda else weight.mT.contiguous()  # which takes a CPU half the time
        for t, before, after in _places(steps, backwards):
            product[:, t].baddbmm_(states[:, before], turned)
            step(*buffers, t, before, after)
        ctx.save_for_backward(weight, *buffers)
        ctx.settings = (mode, backwards, kernels)
        ctx.set_materialize_grads(False)
        return states[:, :-1] if backwards else states[:, 1:], None if c is None else cells[:, last].to(c.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dc: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, *buffers = ctx.saved_tensors
        mode, backwards, kernels = ctx.settings
        product, states = buffers[:2]
        count, steps, rows, _ = product.shape
        dstate, dproduct = product.new_zeros(count, rows, states.shape[-1]), torch.empty_like(product)
        dout = dstate.unsqueeze(1).repeat(1, steps, 1, 1) if dout is None else dout.contiguous()
        gradients, dgiven, carry = [dout, dstate], None, None
        if mode in ("LSTM", "GRU"):
            wide = product.dtype if kernels is None else torch.float32
            carry = torch.zeros_like(dstate, dtype=wide)
            if dc is not None:
                carry.copy_(dc)
            gradients.append(carry)
        gradients.append(dproduct)
        if mode == "GRU":
            dgiven = torch.empty_like(dproduct)
            gradients.append(dgiven)
        _, step = steps_of(mode, kernels)
        of_first = ctx.needs_input_grad[3]
        for t, before, after in _places(steps, backwards, reverse=True):
            step(*buffers, *gradients, t, before, after)
            if of_first or before not in (0, steps):
                torch.bmm(dproduct[:, t], weight, out=dstate)
        dweight = None
        if ctx.needs_input_grad[2]:
            earlier = states[:, 1:] if backwards else states[:, :-1]
            dweight = torch.bmm(dproduct.flatten(1, 2).mT, earlier.flatten(1, 2))
        dh = dstate if of_first else None
        if dh is not None and mode == "GRU":
            dh += carry
        dc = carry.to(product.dtype) if mode == "LSTM" and carry is not None else None
        return dproduct, dgiven, dweight, dh, dc, None, None, None


def _places(steps: int, backwards: bool, reverse: bool = False) -> Iterator[tuple[int, int, int]]:
    """Every step, and the places of the states before and after it, in the order of the steps or against it."""
    for t in range(steps) if backwards == reverse else reversed(range(steps)):
        yield (t, t + 1, t) if backwards else (t, t, t + 1)


def _one_direction(
    mode: str, x: Tensor, parameters: Mapping[str, Tensor], name: str, h: Tensor, c: Tensor | None, backwards: bool,
    kernels: CellKernels | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Of x [C, T, N, in] from the states h (and c) [C, N, size]: all outputs, and the last states."""
    weight = parameters[f"weight_hh_{name}"].expand(len(x), -1, -1)
    bias, bias_of_states = (parameters.get(f"bias_{kind}_{name}") for kind in ("ih", "hh"))
    if mode != "GRU" and bias is not None and bias_of_states is not None:
        bias = bias + bias_of_states
    product, given = linear(x, parameters[f"weight_ih_{name}"], bias).contiguous(), None
    if mode == "GRU":  # whose candidate scales the states' product
        given, product = product, torch.zeros_like(product)
        if bias_of_states is not None:
            product = product + bias_of_states.view(len(bias_of_states), 1, 1, -1)
    out, c = _Steps.apply(product, given, weight, h, c, mode, backwards, kernels)
    return out, out[:, 0 if backwards else -1], c


def _by_library(
    layer: nn.RNNBase, x: Tensor, parameters: Mapping[str, Tensor], names: Sequence[str], h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """All directions of one layer by torch's own function, for every client in turn."""
    kinds = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if layer.bias else ()))
    weights = [parameters[f"{kind}_{name}"] for name in names for kind in kinds]
    count, training = len(x), torch.is_grad_enabled()
    by_client = zip(*(v.expand(count, *v.shape[1:]).unbind(0) for v in (x, h, c, *weights)), strict=True)
    settings = (layer.bias, 1, 0.0, training, layer.bidirectional, False)
    found = [torch._VF.lstm(own, (state, cell), weight, *settings) for own, state, cell, *weight in by_client]
    out, last, cells = (torch.stack(parts) for parts in zip(*found, strict=True))
    return out, last, cells


def recurrent(
    layer: nn.RNNBase, parameters: Mapping[str, Tensor], x: Tensor, initial: Any, drop: Drop, on_gpu: bool,
    kernels: CellKernels | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """What ``layer`` gives for x [C, N, T, in], or [C, T, N, in]; parameters are [C, ...], or [1, ...] if frozen."""
    x = x.transpose(1, 2) if layer.batch_first else x
    directions = 2 if layer.bidirectional else 1
    lstm = layer.mode == "LSTM"
    if initial is None:
        zeros = x.new_zeros(len(x), layer.num_layers * directions, x.shape[2], layer.hidden_size)
        initial = (zeros, zeros) if lstm else zeros
    h0, c0 = initial if lstm else (initial, None)
    last: list[Tensor] = []
    cells: list[Tensor] = []
    for depth in range(layer.num_layers):
        places = range(depth * directions, (depth + 1) * directions)
        names = [f"l{depth}{'_reverse' * direction}" for direction in range(directions)]
        if c0 is not None and not on_gpu and parameters["weight_hh_l0"][0].nbytes > LARGE:
            own = slice(places.start, places.stop)
            x, all_h, all_c = _by_library(layer, x, parameters, names, h0[:, own], c0[:, own])
            last += all_h.unbind(1)
            cells += all_c.unbind(1)
        else:
            outputs = []
            for direction, (place, name) in enumerate(zip(places, names, strict=True)):
                states = (h0[:, place], None if c0 is None else c0[:, place])
                out, h, c = _one_direction(layer.mode, x, parameters, name, *states, bool(direction), kernels)
                outputs.append(out)
                last.append(h)
                if c is not None:
                    cells.append(c)
            x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
        if depth < layer.num_layers - 1:
            x = drop(x.transpose(1, 2)).transpose(1, 2)  # in the order of the examples
    out = x.transpose(1, 2) if layer.batch_first else x
    h = torch.stack(last, 1)
    return out, (h, torch.stack(cells, 1)) if lstm else h
