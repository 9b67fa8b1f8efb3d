"""LayerNorm together with the addition before it: a row is read once; backwards, here, where its weights are frozen."""

from __future__ import annotations

import torch
from torch import Tensor

from .norm_kernels import alike
from .triton_support import TILE, await_inputs, check, jit, power, tl, triton


@jit
def _rows(length, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The program's rows of its client, as rows of all, the places of their elements, which of both there are, and
    their channels."""
    own = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row = own + tl.program_id(1).to(tl.int64) * length
    channel = tl.arange(0, LANES)[None, :]
    return row, row * WIDTH + channel, own < length, (own < length) & (channel < WIDTH), channel


@jit(do_not_specialize=["length", "stride"])
def _added_norm(
    x, other, gamma, beta, total, out, mean, rstd, length, stride, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    row, at, known, inside, channel = _rows(length, WIDTH, ROWS, LANES)
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
    weight = tl.program_id(1).to(tl.int64) * stride + channel
    if gamma is not None:
        value *= tl.load(gamma + weight, mask=channel < WIDTH, other=0.0).to(tl.float32)
    if beta is not None:
        value += tl.load(beta + weight, mask=channel < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    tl.store(mean + row, centre, mask=known)
    tl.store(rstd + row, scale, mask=known)


@jit(do_not_specialize=["length"])
def _added_norm_backward(
    dout, dtotal, total, gamma, mean, rstd, dx, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    await_inputs()
    row, at, known, inside, channel = _rows(length, WIDTH, ROWS, LANES)
    scale = tl.load(rstd + row, mask=known, other=0.0)
    normal = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    normal = (normal - tl.load(mean + row, mask=known, other=0.0)) * scale
    gradient = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    if gamma is not None:
        gradient *= tl.load(gamma + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    along = tl.sum(gradient * normal, 1, keep_dims=True) / WIDTH
    gradient = (gradient - tl.sum(gradient, 1, keep_dims=True) / WIDTH - normal * along) * scale
    if dtotal is not None:
        gradient += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)


def _cut(x: Tensor, clients: int) -> tuple[tuple[int, int], int, tuple[int, int, int], int]:
    """The programs of x [..., channels], a client's rows, the constants of their tiles, with whole rows, and warps."""
    check("rows of a norm", x)
    width = x.shape[-1]
    lanes, length = power(width), x.numel() // width // clients
    rows = max(TILE // lanes, 1)
    return (triton.cdiv(length, rows), clients), length, (width, rows, lanes), max(lanes // 512, 4)


def added_norm(
    x: Tensor, other: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [..., channels] plus ``other``, the norm of the sum over the channels, and its mean and 1 / deviation.

    With weights [channels], or [C, channels] for x [C, ..., channels].
    """
    x, other = x.contiguous(), None if other is None else other.contiguous()
    each = gamma is not None and gamma.dim() == 2
    grid, length, tile, warps = _cut(x, len(x) if each else 1)
    total, out = x if other is None else torch.empty_like(x), torch.empty_like(x)
    mean, rstd = (torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device) for _ in range(2))
    stride = 0
    if each and gamma is not None and beta is not None:
        gamma, beta = alike(gamma, beta)
        stride = gamma.stride(0)
    _added_norm[grid](x, other, gamma, beta, total, out, mean, rstd, length, stride, eps, *tile, num_warps=warps)
    return total, out, mean, rstd


def added_norm_backward(
    dout: Tensor, dtotal: Tensor | None, total: Tensor, gamma: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    """The gradient of the sum: by the norm, and ``dtotal`` where it is used besides."""
    dout, dtotal, dx = dout.contiguous(), None if dtotal is None else dtotal.contiguous(), torch.empty_like(total)
    grid, length, tile, warps = _cut(total, 1)
    _added_norm_backward[grid](dout, dtotal, total, gamma, mean, rstd, dx, length, *tile, num_warps=warps)
    return dx
