"""A linear layer with a low-rank adapter, W x + b + s B A x: as one operation of a trace, and on stacked layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from ..gpu.products import library_product
from .layers import ACTIVATIONS
from .stack import Stack

LARGEST_RANK = 64  # up to which a kernel has a tile's part of an adapter at once


def _formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, transposed: bool
) -> Tensor:
    # The product with the frozen weights stands alone, so that it can be one over the inputs of all clients.
    return F.linear(x, weight.t() if transposed else weight, bias) + scale * F.linear(F.linear(x, a), b)


# torch.export keeps an operator of its own whole.
SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, float scale, bool transposed) -> Tensor"
_operator: Any = torch.library.custom_op("fedlada_mpi::adapted", _formula, mutates_args=(), schema=SCHEMA)
_operator.register_fake(lambda x, weight, bias, a, b, scale, transposed: x.new_empty(*x.shape[:-1], len(b)))


@fx.wrap
def adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, transposed: bool
) -> Tensor:
    """[..., in] -> [..., out], with ``weight`` [out, in], ``a`` [r, in] and ``b`` [out, r]; ``transposed``: [in, out].

    Called as ``low_rank.adapted``, so that torch.fx records it.
    """
    function: Callable[..., Tensor] = _operator if torch.compiler.is_compiling() else _formula
    return function(x, weight, bias, a, b, scale, transposed)


@dataclass(frozen=True)
class _Layer:
    """Frozen weights [out, in] and biases, which all clients share, and the clients' adapters."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor  # [C, r, in]
    a_grad: Tensor | None
    b: Tensor  # [C, out, r]
    b_grad: Tensor | None
    scale: float

    def product(self, x: Tensor) -> Tensor:
        """With the frozen weights: one for all clients."""
        return F.linear(x.flatten(0, 1), self.weight, self.bias).view(*x.shape[:2], -1)

    def inner(self, x: Tensor) -> Tensor:
        """[C, rows, r], whose product with B is to be added."""
        return _scaled_product(x, self.a.mT, self.scale)

    def sum(self, p: Stack, x: Tensor, inner: Tensor) -> Tensor:
        """[C, rows, out]: of the frozen weights and of the adapter.

        The larger product comes last and adds the other one as it is written: it need not be read and written again.
        """
        if p.kernels is None or inner.shape[2] > LARGEST_RANK:
            return self.product(x).baddbmm_(inner, self.b.mT)
        out = p.kernels.low_rank_product(inner, self.b, self.bias)
        out.flatten(0, 1).addmm_(x.flatten(0, 1), self.weight.mT)
        return out

    def inner_gradient(self, p: Stack, dout: Tensor, x: Tensor, inner: Tensor) -> Tensor:
        """That of ``inner``, times the scale; those of the adapter go where they belong."""
        a_grad, b_grad, parts = self.a_grad, self.b_grad, None
        kernels = None if b_grad is None else p.kernels
        if kernels is not None and kernels.takes_gradients(dout, inner.shape[2]):
            dinner, parts = kernels.low_rank_gradients(dout, inner, self.b, self.scale)
        else:
            dinner = _scaled_product(dout, self.b, self.scale)

        def of_parameters() -> None:
            if a_grad is not None:
                library_product(dinner.mT, x, a_grad)
            if b_grad is not None and parts is not None:
                p.steps.column_sums(b_grad.flatten(1), parts.flatten(2))
            elif b_grad is not None:
                library_product(dout.mT, inner, b_grad)

        if a_grad is not None or b_grad is not None:
            p.side_stream.submit(of_parameters, x, inner, dinner, dout if parts is None else parts)
        return dinner

    def input_gradient(self, dout: Tensor) -> Tensor:
        """By the frozen weights alone."""
        return torch.mm(dout.flatten(0, 1), self.weight).view(*dout.shape[:2], -1)

    def whole_input_gradient(self, dout: Tensor, dinner: Tensor) -> Tensor:
        """As ``sum``."""
        dx = torch.bmm(dinner, self.a)
        dx.flatten(0, 1).addmm_(dout.flatten(0, 1), self.weight)
        return dx


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The factor within the product: no pass of its own."""
    return a.new_empty(*a.shape[:2], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)


class _Adapted(torch.autograd.Function):
    """Of x [C, rows, in]; both products of the adapter add to what the frozen weights gave, in its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: _Layer, p: Stack) -> Tensor:
        inner = layer.inner(x)
        ctx.save_for_backward(x, inner)
        ctx.layer, ctx.p = layer, p
        return layer.sum(p, x, inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x, inner), layer, dout = ctx.saved_tensors, ctx.layer, dout.contiguous()
        dinner = layer.inner_gradient(ctx.p, dout, x, inner)
        dx = layer.whole_input_gradient(dout, dinner) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


class _AdaptedPair(torch.autograd.Function):
    """Two such layers with an activation between them, where kernels add the adapters' parts on the way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, first: _Layer, second: _Layer, activation: str, p: Stack
    ) -> Tensor:
        assert p.kernels is not None
        base, inner = first.product(x), first.inner(x)
        hidden = p.kernels.low_rank_activation(base, inner, first.b, activation)
        second_inner = second.inner(hidden)
        ctx.save_for_backward(x, base, inner, hidden, second_inner)
        ctx.layers, ctx.activation, ctx.p = (first, second), activation, p
        return second.sum(p, hidden, second_inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x, base, inner, hidden, second_inner), (first, second), p = ctx.saved_tensors, ctx.layers, ctx.p
        dout = dout.contiguous()
        dinner = second.inner_gradient(p, dout, hidden, second_inner)
        dbase = p.kernels.low_rank_activation_backward(
            second.input_gradient(dout), dinner, second.a, base, inner, first.b, ctx.activation
        )
        dinner = first.inner_gradient(p, dbase, x, inner)
        dx = first.whole_input_gradient(dbase, dinner) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


@dataclass(frozen=True)
class AdaptedLayer:
    """The names of a layer's parameters, of which weight and bias are frozen."""

    weight: str
    bias: str | None
    a: str
    b: str
    scale: float
    transposed: bool

    def of(self, p: Stack) -> _Layer:
        weight = p.value[self.weight][0]
        bias = None if self.bias is None else p.value[self.bias][0]
        adapter = (p.value[self.a], p.grad[self.a], p.value[self.b], p.grad[self.b])
        return _Layer(weight.t() if self.transposed else weight, bias, *adapter, self.scale)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1, x.shape[-1]).contiguous()


def linear(p: Stack, x: Tensor, layer: AdaptedLayer) -> Tensor:
    """x [C, N, ..., in] -> [C, N, ..., out]."""
    return _Adapted.apply(_rows(x), p.anchor_of(layer.a, layer.b), layer.of(p), p).view(*x.shape[:-1], -1)


def pair(p: Stack, x: Tensor, first: AdaptedLayer, activation: str, second: AdaptedLayer) -> Tensor:
    """Two layers with an activation of ``layers.ACTIVATIONS`` between them."""
    layers = (first.of(p), second.of(p))
    if p.kernels is None or any(layer.a.shape[1] > LARGEST_RANK for layer in layers):
        return linear(p, ACTIVATIONS[activation](linear(p, x, first)), second)
    anchor = p.anchor_of(first.a, first.b, second.a, second.b)
    return _AdaptedPair.apply(_rows(x), anchor, *layers, activation, p).view(*x.shape[:-1], -1)
