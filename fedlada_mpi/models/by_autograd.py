"""Layers on parameters [C, ...] whose gradients autograd adds up: tied, frozen and uncommon ones.

``layers.py`` has those that write their gradients straight into the flat one. A parameter that is the same for all
clients, a frozen one, is [1, ...]: one product then takes all clients' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import low_rank
from .client_axis import of_clients
from .stack import Kernels
from .windows import conv, conv_transpose


def _shared(*parameters: Tensor | None) -> bool:
    return all(parameter is None or len(parameter) == 1 for parameter in parameters)


def _only(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter[0]


def _along_last(parameter: Tensor, rank: int) -> Tensor:
    """[C, ...] with axes of one element before those that it has, for tensors with ``rank`` axes."""
    return parameter.reshape(len(parameter), *(1,) * (rank - parameter.dim()), *parameter.shape[1:])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[C, ..., in] -> [C, ..., out]."""
    if _shared(weight, bias):
        return F.linear(x, weight[0], _only(bias))
    if _shared(weight):
        assert bias is not None
        return F.linear(x, weight[0]) + _along_last(bias, x.dim())
    x, weight, bias = of_clients(x, weight, bias)
    rows = x.reshape(len(x), -1, x.shape[-1])
    out = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return out.view(*x.shape[:-1], -1)


def adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, transposed: bool
) -> Tensor:
    return linear(x, weight.mT if transposed else weight, bias) + scale * linear(linear(x, a), b)


def _table_gradient(dout: Tensor, places: Tensor, rows: int, by_frequency: bool, kernels: Kernels | None) -> Tensor:
    """[rows, width]: the sums of dout [n, width] over the places [n] of each row, in a fixed order."""
    if kernels is not None:
        return kernels.embedding_gradient(dout, places, rows, by_frequency)
    if not dout.is_cuda:
        return torch.ops.aten.embedding_dense_backward(dout, places, rows, -1, by_frequency)
    if by_frequency:
        ordered = places.sort().values
        counts = torch.searchsorted(ordered, places, right=True) - torch.searchsorted(ordered, places)
        dout = dout / counts.unsqueeze(-1)
    return dout.new_zeros(rows, dout.shape[1]).index_put_((places,), dout, accumulate=True)


class _Embedding(torch.autograd.Function):
    """Rows of each client's own table."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, table: Tensor, padding: int | None, by_frequency: bool, kernels: Kernels | None
    ) -> Tensor:
        clients = torch.arange(len(table), device=ids.device).view(-1, *(1,) * (ids.dim() - 1))
        ctx.save_for_backward(ids, clients)
        ctx.shape, ctx.settings = table.shape, (padding, by_frequency, kernels)
        return table[clients, ids]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (ids, clients), (padding, by_frequency, kernels) = ctx.saved_tensors, ctx.settings
        count, size, width = ctx.shape
        if padding is not None:
            dout = dout.masked_fill((ids == padding % size).unsqueeze(-1), 0)
        places = (ids + clients * size).reshape(-1)
        gradient = _table_gradient(dout.reshape(-1, width), places, count * size, by_frequency, kernels)
        return None, gradient.view(ctx.shape), None, None, None


def embedding(
    ids: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False, kernels: Kernels | None = None,
) -> Tensor:  # fmt: skip
    """[C, ...] integers -> [C, ..., width]."""
    if not weight.requires_grad and _shared(weight):
        return F.embedding(ids, weight[0])
    ids, weight = of_clients(ids, weight)
    return _Embedding.apply(ids, weight, padding_idx, scale_grad_by_freq, kernels)


def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if _shared(weight, bias):
        return F.layer_norm(x, normalized_shape, _only(weight), _only(bias), eps)
    return _affine(F.layer_norm(x, normalized_shape, None, None, eps), weight, bias)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if _shared(weight):
        return F.rms_norm(x, normalized_shape, _only(weight), eps)
    return _affine(F.rms_norm(x, normalized_shape, None, eps), weight, None)


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Of x [C, N, channels, ...]."""
    normal = F.group_norm(x.flatten(0, 1), num_groups, eps=eps).unflatten(0, x.shape[:2])
    size = (1,) * (x.dim() - 3)
    return _affine(normal, *(p if p is None else p.reshape(len(p), 1, -1, *size) for p in (weight, bias)))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * _along_last(weight, x.dim())
    return x if bias is None else x + _along_last(bias, x.dim())


LAYERS: dict[Any, Callable[..., Tensor]] = {
    F.linear: linear,
    low_rank.adapted: adapted,
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    **({F.rms_norm: rms_norm} if hasattr(F, "rms_norm") else {}),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), conv),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), conv_transpose),
}
WITH_KERNELS = (embedding,)  # which take compiled kernels as ``kernels``
