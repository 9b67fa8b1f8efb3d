"""LayerNorm with frozen weights, together with the addition before it: a row is read once, forwards and backwards."""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_support import TILE, check, jit, power, tl, triton


@jit
def _rows(length, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The program's rows, the places of their elements, which of them there are, and their channels."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, LANES)[None, :]
    return row, row * WIDTH + channel, (row < length) & (channel < WIDTH), channel


@jit(do_not_specialize=["length"])
def _added_norm(
    x, other, gamma, beta, total, out, mean, rstd, length, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    row, at, inside, channel = _rows(length, WIDTH, ROWS, LANES)
    value = tl.load(x + at, mask=inside, other=0.0)
    if other is not None:
        value = value.to(tl.float32) + tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)  # what the norm gets is the sum as it is stored
        tl.store(total + at, value, mask=inside)
    value = value.to(tl.float32)
    centre = tl.sum(value, 1, keep_dims=True) / WIDTH
    value = tl.where(channel < WIDTH, value - centre, 0.0)
    scale = 1 / tl.sqrt(tl.sum(value * value, 1, keep_dims=True) / WIDTH + eps)
    value *= scale
    if gamma is not None:
        value *= tl.load(gamma + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    if beta is not None:
        value += tl.load(beta + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    tl.store(mean + row, centre, mask=row < length)
    tl.store(rstd + row, scale, mask=row < length)


@jit(do_not_specialize=["length"])
def _added_norm_backward(
    dout, dtotal, total, gamma, mean, rstd, dx, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    row, at, inside, channel = _rows(length, WIDTH, ROWS, LANES)
    scale = tl.load(rstd + row, mask=row < length, other=0.0)
    normal = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    normal = (normal - tl.load(mean + row, mask=row < length, other=0.0)) * scale
    gradient = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    if gamma is not None:
        gradient *= tl.load(gamma + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    along = tl.sum(gradient * normal, 1, keep_dims=True) / WIDTH
    gradient = (gradient - tl.sum(gradient, 1, keep_dims=True) / WIDTH - normal * along) * scale
    if dtotal is not None:
        gradient += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)


def _cut(x: Tensor) -> tuple[tuple[int], int, tuple[int, int, int], int]:
    """The programs of x [..., channels], its rows, the constants of their tiles, which have whole rows, and warps."""
    check("rows of a norm", x)
    width = x.shape[-1]
    lanes, length = power(width), x.numel() // width
    rows = max(TILE // lanes, 1)
    return (triton.cdiv(length, rows),), length, (width, rows, lanes), max(lanes // 512, 4)


def added_norm(
    x: Tensor, other: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [..., channels] plus ``other``, the norm of the sum over the channels, and its mean and 1 / deviation."""
    x, other = x.contiguous(), None if other is None else other.contiguous()
    grid, length, tile, warps = _cut(x)
    total, out = x if other is None else torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (torch.empty(length, dtype=torch.float32, device=x.device) for _ in range(2))
    _added_norm[grid](x, other, gamma, beta, total, out, mean, rstd, length, eps, *tile, num_warps=warps)
    return total, out, mean, rstd


def added_norm_backward(
    dout: Tensor, dtotal: Tensor | None, total: Tensor, gamma: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    """The gradient of the sum: by the norm, and ``dtotal`` where it is used besides."""
    dout, dtotal, dx = dout.contiguous(), None if dtotal is None else dtotal.contiguous(), torch.empty_like(total)
    grid, length, tile, warps = _cut(total)
    _added_norm_backward[grid](dout, dtotal, total, gamma, mean, rstd, dx, length, *tile, num_warps=warps)
    return dx
