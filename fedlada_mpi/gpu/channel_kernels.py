"""What every element does with a number of its channel, the last axis: a bias and an activation, or a factor."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from .triton_support import TILE, check, jit, power, tl, triton

SQRT_HALF = tl.constexpr(0.7071067811865476) if tl else None
DENSITY = tl.constexpr(0.3989422804014327) if tl else None  # of a standard normal at 0
CUBIC = tl.constexpr(0.044715) if tl else None
SLOPE = tl.constexpr(0.7978845608028654) if tl else None  # sqrt(2 / pi)


@jit
def _tanh(value):
    return 1 - 2 / (tl.exp(2 * value) + 1)


@jit
def _activated(value, NAME: tl.constexpr):
    if NAME == "relu":
        value = tl.where(value > 0, value, tl.where(value != value, value, 0.0))
    elif NAME == "gelu":
        value = 0.5 * value * (1 + tl.erf(value * SQRT_HALF))
    elif NAME == "gelu_tanh":
        value = 0.5 * value * (1 + _tanh((value + value * value * value * CUBIC) * SLOPE))
    else:  # silu
        value = value / (1 + tl.exp(-value))
    return value


@jit
def _slope(value, NAME: tl.constexpr):
    if NAME == "relu":
        slope = tl.where(value > 0, 1.0, 0.0)
    elif NAME == "gelu":
        slope = 0.5 * (1 + tl.erf(value * SQRT_HALF)) + value * DENSITY * tl.exp(-0.5 * value * value)
    elif NAME == "gelu_tanh":
        height = _tanh((value + value * value * value * CUBIC) * SLOPE)
        slope = 0.5 * (1 + height) + 0.5 * value * (1 - height * height) * (1 + value * value * 3 * CUBIC) * SLOPE
    else:  # silu
        share = 1 / (1 + tl.exp(-value))
        slope = share * (1 + value * (1 - share))
    return slope


@jit
def _places(length, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The program's elements of its client, which of them there are, and their channels."""
    blocks: tl.constexpr = (WIDTH + LANES - 1) // LANES
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(0) % blocks * LANES + tl.arange(0, LANES)[None, :]
    return row * WIDTH + channel, (row < length) & (channel < WIDTH), channel


@jit(do_not_specialize=["length", "stride"])
def _bias_activation(
    x, bias, out, length, stride, NAME: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    client = tl.program_id(1).to(tl.int64)
    at, inside, channel = _places(length, WIDTH, ROWS, LANES)
    at += client * length * WIDTH
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + client * stride + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + at, _activated(value, NAME).to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["length", "stride"])
def _bias_activation_backward(
    dout, x, bias, dx, sums, length, stride, NAME: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    at, inside, channel = _places(length, WIDTH, ROWS, LANES)
    at += client * length * WIDTH
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + client * stride + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    gradient = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32) * _slope(value, NAME)
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)
    blocks: tl.constexpr = (WIDTH + LANES - 1) // LANES
    sums += (client * ((length + ROWS - 1) // ROWS) + tl.program_id(0) // blocks) * WIDTH
    tl.store(sums + channel, tl.sum(gradient, 0, keep_dims=True), mask=channel < WIDTH)


@jit(do_not_specialize=["length", "stride"])
def _scale(x, factor, out, length, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    at, inside, channel = _places(length, WIDTH, ROWS, LANES)
    at += client * length * WIDTH
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factor + client * stride + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _cut(x: Tensor) -> tuple[tuple[int, int], int, tuple[int, int, int]]:
    """The programs of x [C, ..., channels], the rows of a client, and the constants of their tiles."""
    check("channels", x)
    width = x.shape[-1]
    lanes = gcd(width, 256)
    lanes = lanes if lanes >= 16 else min(power(width), 256)
    rows, length = TILE // lanes, x[0].numel() // width
    return (triton.cdiv(length, rows) * triton.cdiv(width, lanes), len(x)), length, (width, rows, lanes)


def bias_activation(x: Tensor, bias: Tensor, name: str) -> Tensor:
    """The activation ``name`` of x [C, ..., channels] plus bias [C, channels]."""
    out, (grid, length, tile) = torch.empty_like(x), _cut(x)
    _bias_activation[grid](x, bias, out, length, bias.stride(0), name, *tile)
    return out


def bias_activation_backward(dout: Tensor, x: Tensor, bias: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The gradient of x, and partial sums [C, parts, channels] of which the bias's is the sum."""
    dx, dout, (grid, length, tile) = torch.empty_like(x), dout.contiguous(), _cut(x)
    width, rows, _ = tile
    sums = torch.empty(len(x), triton.cdiv(length, rows), width, dtype=torch.float32, device=x.device)
    # A thread's loads stay 16 bytes wide: half the elements' size takes half the threads.
    warps = x.element_size()
    _bias_activation_backward[grid](dout, x, bias, dx, sums, length, bias.stride(0), name, *tile, num_warps=warps)
    return dx, sums


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """x [C, ..., channels] times factor [C, channels]."""
    x = x.contiguous()
    out, (grid, length, tile) = torch.empty_like(x), _cut(x)
    _scale[grid](x, factor, out, length, factor.stride(0), *tile)
    return out
