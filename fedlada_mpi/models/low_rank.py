"""A linear layer with a low-rank adapter, W x + b + s B A x: as one operation of a trace, and on stacked layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from .layers import Stack, product_into


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


class _Adapted(torch.autograd.Function):
    """Of x [C, rows, in]; both products of the adapter add to what the frozen weights gave, in its place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, a_grad: Tensor | None,
        b: Tensor, b_grad: Tensor | None, scale: float, p: Stack,
    ) -> Tensor:  # fmt: skip
        out = F.linear(x.flatten(0, 1), weight, bias).view(*x.shape[:2], -1)
        inner = _scaled_product(x, a.mT, scale)
        ctx.save_for_backward(x, inner, weight, a, b)
        ctx.grads, ctx.scale, ctx.p = (a_grad, b_grad), scale, p
        return out.baddbmm_(inner, b.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, weight, a, b = ctx.saved_tensors
        a_grad, b_grad = ctx.grads
        dout = dout.contiguous()
        dinner = _scaled_product(dout, b, ctx.scale)

        def of_parameters() -> None:
            if a_grad is not None:
                product_into(a_grad, dinner, x)
            if b_grad is not None:
                product_into(b_grad, dout, inner)

        if a_grad is not None or b_grad is not None:
            ctx.p.side_stream.submit(of_parameters, x, inner, dinner, dout)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(dout.flatten(0, 1), weight).view(x.shape).baddbmm_(dinner, a)
        return dx, None, None, None, None, None, None, None, None, None


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The factor within the product: no pass of its own."""
    return a.new_empty(*a.shape[:2], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)


def linear(
    p: Stack, x: Tensor, weight: str, bias: str | None, a: str, b: str, scale: float, transposed: bool
) -> Tensor:
    """x [C, N, ..., in] -> [C, N, ..., out]; weight and bias are frozen."""
    frozen = p.value[weight][0]
    fixed = (frozen.t() if transposed else frozen, None if bias is None else p.value[bias][0])
    rows, trained = x.reshape(len(x), -1, x.shape[-1]), (p.value[a], p.grad[a], p.value[b], p.grad[b])
    return _Adapted.apply(rows, p.anchor_of(a, b), *fixed, *trained, scale, p).view(*x.shape[:-1], -1)
