"""What every element does with a number of its channel, the last axis: a bias and an activation, or a factor."""

from __future__ import annotations

import torch
from torch import Tensor

from .triton_support import TILE, check, jit, tl, triton

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
def _places(length, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The program's elements of its client, which of them there are, and their channels."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    return at, at < length, at % WIDTH


@jit(do_not_specialize=["length", "stride"])
def _bias_activation(x, bias, out, length, stride, WIDTH: tl.constexpr, NAME: tl.constexpr, TILE: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    at, inside, channel = _places(length, WIDTH, TILE)
    value = tl.load(x + client * length + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + client * stride + channel).to(tl.float32)
    tl.store(out + client * length + at, _activated(value, NAME).to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["length", "stride"])
def _bias_activation_backward(
    dout, x, bias, dx, length, stride, WIDTH: tl.constexpr, NAME: tl.constexpr, TILE: tl.constexpr
):
    client = tl.program_id(1).to(tl.int64)
    at, inside, channel = _places(length, WIDTH, TILE)
    value = tl.load(x + client * length + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + client * stride + channel).to(tl.float32)
    gradient = tl.load(dout + client * length + at, mask=inside, other=0.0).to(tl.float32) * _slope(value, NAME)
    tl.store(dx + client * length + at, gradient.to(dx.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["length", "stride"])
def _scale(x, factor, out, length, stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    at, inside, channel = _places(length, WIDTH, TILE)
    value = tl.load(x + client * length + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factor + client * stride + channel).to(tl.float32)
    tl.store(out + client * length + at, value.to(out.dtype.element_ty), mask=inside)


def _grid(x: Tensor) -> tuple[int, int]:
    check("channels", x)
    return triton.cdiv(x[0].numel(), TILE), len(x)


def bias_activation(x: Tensor, bias: Tensor, name: str) -> Tensor:
    """The activation ``name`` of x [C, ..., channels] plus bias [C, channels]."""
    out = torch.empty_like(x)
    _bias_activation[_grid(x)](x, bias, out, x[0].numel(), bias.stride(0), x.shape[-1], name, TILE)
    return out


def bias_activation_backward(dout: Tensor, x: Tensor, bias: Tensor, name: str) -> Tensor:
    dx, dout = torch.empty_like(x), dout.contiguous()
    _bias_activation_backward[_grid(x)](dout, x, bias, dx, x[0].numel(), bias.stride(0), x.shape[-1], name, TILE)
    return dx


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """x [C, ..., channels] times factor [C, channels]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _scale[_grid(x)](x, factor, out, x[0].numel(), factor.stride(0), x.shape[-1], TILE)
    return out
