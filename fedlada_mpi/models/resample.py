"""Operations that are linear along every side of a map: interpolation, averages, and borders of the map itself.

torch's kernels for their gradients add up in no fixed order on a GPU. There, each side is a product with the matrix
that the operation is; on a CPU they are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Along: TypeAlias = Callable[[Tensor], Tensor]  # of [1, channels, length]
LINEAR = ("linear", "bilinear", "trilinear")


def by_products(x: Tensor, sides: Sequence[Along]) -> Tensor:
    """A function of each side of maps x [N, channels, *sides], the first for the first side."""
    for axis, along in enumerate(sides, x.dim() - len(sides)):
        matrix = along(torch.eye(x.shape[axis], dtype=x.dtype, device=x.device).unsqueeze(0))[0]
        x = torch.matmul(x.movedim(axis, -1), matrix).movedim(-1, axis)
    return x


def _each(value: Any, count: int) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,) * count


def interpolation(
    x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> list[Along] | None:  # fmt: skip
    if mode not in LINEAR or antialias:
        return None
    count = x.dim() - 2
    return [
        partial(
            F.interpolate, size=s, scale_factor=f, mode="linear", align_corners=align_corners,
            recompute_scale_factor=recompute_scale_factor,
        )
        for s, f in zip(_each(size, count), _each(scale_factor, count), strict=True)
    ]  # fmt: skip


def adaptive_average(x: Tensor, output_size: Any) -> list[Along]:
    sizes = _each(output_size, x.dim() - 2)
    kept = [n if out is None else out for n, out in zip(x.shape[2:], sizes, strict=True)]
    return [partial(F.adaptive_avg_pool1d, output_size=out) for out in kept]


def average(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> list[Along] | None:  # fmt: skip
    if divisor_override is not None:
        return None
    settings = (_each(value, x.dim() - 2) for value in (kernel_size, stride or kernel_size, padding))
    edges: Any = dict(ceil_mode=ceil_mode, count_include_pad=count_include_pad)
    return [
        partial(F.avg_pool1d, kernel_size=k, stride=s, padding=p, **edges) for k, s, p in zip(*settings, strict=True)
    ]


def border(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> list[Along] | None:
    if mode not in ("reflect", "replicate"):
        return None
    pairs = [tuple(pad[i : i + 2]) for i in range(0, len(pad), 2)]
    return [partial(F.pad, pad=pair, mode=mode) for pair in reversed(pairs)]


SEPARABLE: dict[Any, Callable[..., list[Along] | None]] = {
    F.interpolate: interpolation,
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), adaptive_average),
    F.avg_pool3d: average,
    F.pad: border,
}


def repeatable(function: Any) -> Any:
    """The function, with gradients that are the same every time on a GPU."""
    sides_of = SEPARABLE.get(function)
    if sides_of is None:
        return function

    def run(x: Tensor, *others: Any, **options: Any) -> Tensor:
        sides = sides_of(x, *others, **options) if x.is_cuda else None
        return function(x, *others, **options) if sides is None else by_products(x, sides)

    return run
