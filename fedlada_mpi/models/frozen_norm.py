"""LayerNorm whose weights are frozen, and the same for all clients, with the addition before it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layers import Kernels, Stack

WIDEST = 8192  # channels of a row that the kernels hold whole


class _AddedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor] | Tensor:  # fmt: skip
        total, out, mean, rstd = kernels.added_norm(x, other, gamma, beta, eps)
        ctx.save_for_backward(total, gamma, mean, rstd)
        ctx.kernels, ctx.added = kernels, other is not None
        ctx.set_materialize_grads(False)
        return (total, out) if ctx.added else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dout = gradients if ctx.added else (None, *gradients)
        if dout is not None:
            total, gamma, mean, rstd = ctx.saved_tensors
            dx = ctx.kernels.added_norm_backward(dout, dx, total, gamma, mean, rstd)
        return dx, dx if ctx.added else None, None, None, None, None


def _by_kernels(p: Stack, x: Tensor) -> bool:
    return p.kernels is not None and x.shape[-1] <= WIDEST and x.dtype == p.dtype


def _weight(p: Stack, name: str | None) -> Tensor | None:
    return None if name is None else p.value[name][0]


def norm(p: Stack, x: Tensor, weight: str | None, bias: str | None, eps: float) -> Tensor:
    """Over the last axis of x [C, N, ..., channels]."""
    gamma, beta = _weight(p, weight), _weight(p, bias)
    if _by_kernels(p, x):
        return _AddedNorm.apply(x, None, gamma, beta, eps, p.kernels)
    return F.layer_norm(x, x.shape[-1:], gamma, beta, eps)


def added_norm(
    p: Stack, x: Tensor, other: Tensor, weight: str | None, bias: str | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x [C, N, ..., channels] plus another tensor of its shape, and the norm of the sum."""
    gamma, beta = _weight(p, weight), _weight(p, bias)
    if _by_kernels(p, x) and other.dtype == x.dtype:
        return _AddedNorm.apply(x, other, gamma, beta, eps, p.kernels)
    total = x + other
    return total, F.layer_norm(total, x.shape[-1:], gamma, beta, eps)
