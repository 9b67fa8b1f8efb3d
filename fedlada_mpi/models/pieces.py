"""A tensor cut into pieces whose gradients may lie as the gradient of the whole has them.

Queries, keys and values are often pieces of one product. Attention on a GPU writes their gradients next to each other,
as they lie in it; there is then nothing left to join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Cut: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
Join: TypeAlias = Callable[[Sequence[Tensor]], Tensor]


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: Cut, join: Join) -> tuple[Tensor, ...]:
        ctx.shape, ctx.cut, ctx.join = whole.shape, cut, join
        return tuple(cut(whole))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = _whole(grads, ctx.shape, ctx.cut)
        return ctx.join(grads) if whole is None else whole, None, None


def _whole(pieces: Sequence[Tensor], shape: torch.Size, cut: Cut) -> Tensor | None:
    """The tensor of which these are the pieces, without a copy; None if there is none."""
    first = pieces[0]
    start, storage = first.storage_offset(), first.untyped_storage()
    if first.is_meta or (start + shape.numel()) * first.element_size() > storage.nbytes():
        return None
    strides = [1] * len(shape)
    for i in reversed(range(len(shape) - 1)):
        strides[i] = strides[i + 1] * shape[i + 1]
    whole = first.as_strided(shape, strides, start)
    expected = [(piece.data_ptr(), piece.shape, piece.stride()) for piece in cut(whole)]
    return whole if [(piece.data_ptr(), piece.shape, piece.stride()) for piece in pieces] == expected else None


def chunk(x: Tensor, chunks: int, dim: int) -> tuple[Tensor, ...]:
    return _cut(x, lambda whole: whole.chunk(chunks, dim), dim)


def split(x: Tensor, sizes: Any, dim: int) -> tuple[Tensor, ...]:
    return _cut(x, lambda whole: whole.split(sizes, dim), dim)


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = _Pieces.apply(
        x, lambda whole: whole.unbind(dim), lambda grads: torch.stack(grads, dim)
    )
    return pieces


def _cut(x: Tensor, cut: Cut, dim: int) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = _Pieces.apply(x, cut, lambda grads: torch.cat(grads, dim))
    return pieces
