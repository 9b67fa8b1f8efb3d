"""LayerNorm with the addition before it; its weights are trained, or frozen and the same for all clients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layers import layer_norm
from .stack import Stack

WIDEST = {True: 4096, False: 8192}  # channels of a row that the kernels hold whole, where it is trained and where not
Grads = tuple[Tensor | None, Tensor | None]


class _AddedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor | None, anchor: Tensor, gamma: Tensor | None, beta: Tensor | None,
        grads: Grads | None, eps: float, p: Stack,
    ) -> tuple[Tensor, Tensor] | Tensor:  # fmt: skip
        assert p.kernels is not None
        total, out, mean, rstd = p.kernels.added_norm(x, other, gamma, beta, eps)
        ctx.save_for_backward(total, gamma, mean, rstd)
        ctx.p, ctx.added, ctx.grads = p, other is not None, grads
        ctx.set_materialize_grads(False)
        return (total, out) if ctx.added else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dout = gradients if ctx.added else (None, *gradients)
        kernels, (total, gamma, mean, rstd) = ctx.p.kernels, ctx.saved_tensors
        if dout is not None and ctx.grads is None:
            dx = kernels.added_norm_backward(dout, dx, total, gamma, mean, rstd)
        elif dout is not None:
            dx = kernels.row_norm_backward(dout, dx, total, gamma, mean, rstd, *ctx.grads, ctx.p.side_stream)
        return dx, dx if ctx.added else None, None, None, None, None, None, None


def _by_kernels(p: Stack, trained: bool, *tensors: Tensor) -> bool:
    narrow = tensors[0].shape[-1] <= WIDEST[trained]
    return p.kernels is not None and narrow and all(x.dtype == p.dtype for x in tensors)


def _weight(p: Stack, name: str | None) -> Tensor | None:
    return None if name is None else p.value[name][0]


def frozen(p: Stack, x: Tensor, weight: str | None, bias: str | None, eps: float) -> Tensor:
    """Over the last axis of x [C, N, ..., channels]."""
    gamma, beta = _weight(p, weight), _weight(p, bias)
    if _by_kernels(p, False, x):
        return _AddedNorm.apply(x, None, p.fixed, gamma, beta, None, eps, p)
    return F.layer_norm(x, x.shape[-1:], gamma, beta, eps)


def added_frozen(
    p: Stack, x: Tensor, other: Tensor, weight: str | None, bias: str | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x [C, N, ..., channels] plus another tensor of its shape, and the norm of the sum."""
    gamma, beta = _weight(p, weight), _weight(p, bias)
    if _by_kernels(p, False, x, other):
        return _AddedNorm.apply(x, other, p.fixed, gamma, beta, None, eps, p)
    total = x + other
    return total, F.layer_norm(total, x.shape[-1:], gamma, beta, eps)


def added_trained(
    p: Stack, x: Tensor, other: Tensor, weight: str | None, bias: str | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As ``added_frozen`` with every client's own weights."""
    if not _by_kernels(p, True, x, other):
        total = x + other
        return total, layer_norm(p, total, weight, bias, eps)
    (gamma, *dgamma), (beta, *dbeta) = p.affine(weight, x.shape[-1], 1.0), p.affine(bias, x.shape[-1], 0.0)
    return _AddedNorm.apply(x, other, p.anchor_of(weight, bias), gamma, beta, (*dgamma, *dbeta), eps, p)
