"""Convolutions and transposed ones over maps with any number of sides, as products of all clients.

Maps are [C, N, channels, *sides] and weights as in torch, [C, out, in, *kernel]; [1, ...] where all clients have the
same ones. Sums over taps have a fixed order, so that a GPU gives the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .client_axis import of_clients


def _each(value: Any, count: int) -> tuple[int, ...]:
    """A number for every side, from one for all or a sequence."""
    numbers = (value,) * count if isinstance(value, int) else tuple(value)
    return numbers * count if len(numbers) == 1 else numbers


@dataclass(frozen=True)
class _Taps:
    """A kernel on maps that are padded already."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    out: tuple[int, ...]  # the sides of the outputs

    def places(self) -> list[tuple[slice, ...]]:
        """For every tap, the pixels that it meets."""
        return [
            tuple(
                slice(tap * d, tap * d + (o - 1) * s + 1, s)
                for tap, d, s, o in zip(taps, self.dilation, self.stride, self.out, strict=True)
            )
            for taps in product(*map(range, self.kernel))
        ]


def _columns(x: Tensor, taps: _Taps) -> Tensor:
    """[C, N, channels, *sides] -> [C, N, *out, channels, taps]."""
    columns = x.new_empty(*x.shape[:2], *taps.out, x.shape[2], prod(taps.kernel))
    for tap, place in enumerate(taps.places()):
        columns[..., tap] = x[(slice(None),) * 3 + place].movedim(2, -1)
    return columns


def _maps(columns: Tensor, taps: _Taps, sides: Sequence[int]) -> Tensor:
    """The transpose of ``_columns``: every pixel sums what its taps give."""
    maps = columns.new_zeros(*columns.shape[:2], columns.shape[-2], *sides)
    for tap, place in enumerate(taps.places()):
        maps[(slice(None),) * 3 + place] += columns[..., tap].movedim(-1, 2)
    return maps


class _ToColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: _Taps) -> Tensor:
        ctx.taps, ctx.sides = taps, x.shape[3:]
        return _columns(x, taps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dcolumns: Tensor) -> tuple[Tensor | None, ...]:
        return _maps(dcolumns, ctx.taps, ctx.sides), None


class _ToMaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, columns: Tensor, taps: _Taps, sides: Sequence[int]) -> Tensor:
        ctx.taps = taps
        return _maps(columns, taps, sides)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmaps: Tensor) -> tuple[Tensor | None, ...]:
        return _columns(dmaps, ctx.taps), None, None


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """[C, N, ..., in] with [C, in, out], or with the same [1, in, out] for all clients."""
    if len(weight) == 1:
        return torch.matmul(rows, weight[0])
    return torch.bmm(rows.reshape(len(rows), -1, rows.shape[-1]), weight).view(*rows.shape[:-1], -1)


def _groups_apart(x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Every group as a client of its own."""
    x, weight = of_clients(x, weight)
    maps = x.unflatten(2, (groups, -1)).movedim(2, 1).flatten(0, 1)
    return maps, weight.unflatten(1, (groups, -1)).flatten(0, 1)


def _groups_together(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(0, (-1, groups)).movedim(1, 2).flatten(2, 3)


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.reshape(len(bias), 1, -1, *(1,) * (x.dim() - 3))


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    if groups > 1:
        apart = conv(*_groups_apart(x, weight, groups), None, stride, padding, dilation)
        return _with_bias(_groups_together(apart, groups), bias)
    kernel, sides = tuple(weight.shape[3:]), weight.dim() - 3
    stride, dilation = _each(stride, sides), _each(dilation, sides)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if padding == "same":
        around = [(r // 2, r - r // 2) for r in reach]
    else:
        around = [(n, n) for n in _each(0 if padding == "valid" else padding, sides)]
    x = F.pad(x, [n for pair in reversed(around) for n in pair])
    out = tuple((size - r - 1) // s + 1 for size, r, s in zip(x.shape[3:], reach, stride, strict=True))
    columns = _ToColumns.apply(x, _Taps(kernel, stride, dilation, out)).flatten(-2)
    return _with_bias(_product(columns, weight.flatten(2).mT).movedim(-1, 2), bias)


def conv_transpose(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Tensor:  # fmt: skip
    """With weights [C, in, out, *kernel]."""
    if groups > 1:
        apart = conv_transpose(*_groups_apart(x, weight, groups), None, stride, padding, output_padding, 1, dilation)
        return _with_bias(_groups_together(apart, groups), bias)
    (channels, *kernel), sides = weight.shape[2:], weight.dim() - 3
    steps, taps_apart, more, border = (_each(value, sides) for value in (stride, dilation, output_padding, padding))
    rows = _product(x.movedim(2, -1), weight.flatten(2))
    if steps == tuple(kernel) and not any(more) and not any(border) and set(taps_apart) == {1}:
        # Taps do not overlap: [C, N, *sides, channels, *kernel] in another order.
        order = [n for side in range(sides) for n in (2 + side, 3 + sides + side)]
        blocks = rows.unflatten(-1, (channels, *kernel)).permute(0, 1, 2 + sides, *order)
        whole = [n * s for n, s in zip(x.shape[3:], steps, strict=True)]
        return _with_bias(blocks.reshape(*x.shape[:2], channels, *whole), bias)
    sizes = zip(x.shape[3:], steps, taps_apart, kernel, more, strict=True)
    whole = [(n - 1) * s + d * (k - 1) + 1 + m for n, s, d, k, m in sizes]
    taps = _Taps(tuple(kernel), steps, taps_apart, tuple(x.shape[3:]))
    maps = _ToMaps.apply(rows.unflatten(-1, (channels, -1)), taps, whole)
    inner = tuple(slice(b, n - b) for n, b in zip(whole, border, strict=True))
    return _with_bias(maps[(slice(None),) * 3 + inner], bias)
