"""What every element does with a number of its channel, the last axis: a bias and an activation, or a factor."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from .triton_support import LOG2_E, TILE, await_inputs, check, exp2, inverse, jit, own_channels, power, tl, triton

DENSITY = tl.constexpr(0.3989422804014327) if tl else None  # of a standard normal at 0
CUBIC: Any = tl.constexpr(0.044715) if tl else None
SLOPE: Any = tl.constexpr(0.7978845608028654) if tl else None  # sqrt(2 / pi)


@jit
def _normal(value):
    """The distribution function of a standard normal and e to the power -value^2 / 2.

    By formula 7.1.26 of Abramowitz and Stegun, within 1e-7: a third of the instructions of ``tl.erf`` and ``tl.exp``.
    """
    bell = tl.exp2(-0.7213475204 * value * value)
    t = 1 / (1 + 0.23164188 * tl.abs(value))
    series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    tail = t * series * bell
    return tl.where(value > 0, 1 - tail, tail), bell


@jit
def tanh(value):
    return 1 - 2 / (tl.exp(2 * value) + 1)


@jit
def _half_of_tanh(value):
    """Half of 1 + tanh((value + CUBIC value^3) SLOPE), which is 1 / (1 + 2^-x): a third of its instructions."""
    return inverse(1 + exp2(value * (-2 * SLOPE * LOG2_E - 2 * SLOPE * CUBIC * LOG2_E * (value * value))))


@jit
def activated(value, NAME: tl.constexpr):
    if NAME == "relu":
        value = tl.where(value > 0, value, tl.where(value != value, value, 0.0))
    elif NAME == "relu6":
        value = tl.where(value > 0, tl.where(value < 6, value, 6.0), tl.where(value != value, value, 0.0))
    elif NAME == "gelu":
        below, _ = _normal(value)
        value *= below
    elif NAME == "gelu_tanh":
        value *= _half_of_tanh(value)
    else:  # silu
        value = value / (1 + tl.exp(-value))
    return value


@jit
def slope_of(value, NAME: tl.constexpr):
    if NAME == "relu":
        slope = tl.where(value > 0, 1.0, 0.0)
    elif NAME == "relu6":
        slope = tl.where((value > 0) & (value < 6), 1.0, 0.0)
    elif NAME == "gelu":
        below, bell = _normal(value)
        slope = below + value * DENSITY * bell
    elif NAME == "gelu_tanh":
        share = _half_of_tanh(value)
        slope = share + value * (share - share * share) * (2 * SLOPE + 6 * SLOPE * CUBIC * (value * value))
    else:  # silu
        share = 1 / (1 + tl.exp(-value))
        slope = share * (1 + value * (1 - share))
    return slope


@jit
def _places(tile, channel, length, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The elements in a tile of the program's client, and which of them there are."""
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    at = row * WIDTH + channel + tl.program_id(1).to(tl.int64) * length * WIDTH
    return at, (row < length) & (channel < WIDTH)


@jit(do_not_specialize=["length", "stride"])
def _bias_activation(
    x, bias, out, length, stride, NAME: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    tile, channel = own_channels(WIDTH, LANES)
    at, inside = _places(tile, channel, length, WIDTH, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + client * stride + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + at, activated(value, NAME).to(out.dtype.element_ty), mask=inside)


@jit
def _tile_backward(
    dout, x, bias, dx, length, stride, tile, channel, NAME: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    client = tl.program_id(1).to(tl.int64)
    at, inside = _places(tile, channel, length, WIDTH, ROWS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + client * stride + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    gradient = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32) * slope_of(value, NAME)
    tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)
    return gradient


@jit(do_not_specialize=["length", "stride"])
def _bias_activation_backward(
    dout, x, bias, dx, sums, length, stride, NAME: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    await_inputs()
    part, channel = own_channels(WIDTH, LANES)
    if TILES == 1:
        total = _tile_backward(dout, x, bias, dx, length, stride, part, channel, NAME, WIDTH, ROWS)
    else:
        total = tl.zeros([ROWS, LANES], tl.float32)
        for tile in range(part * TILES, (part + 1) * TILES):
            total += _tile_backward(dout, x, bias, dx, length, stride, tile, channel, NAME, WIDTH, ROWS)
    parts = (length + ROWS * TILES - 1) // (ROWS * TILES)
    sums += (tl.program_id(1).to(tl.int64) * parts + part) * WIDTH
    tl.store(sums + channel, tl.sum(total, 0, keep_dims=True), mask=channel < WIDTH)


@jit(do_not_specialize=["length", "stride"])
def _spread(bias, out, length, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    tile, channel = own_channels(WIDTH, LANES)
    at, inside = _places(tile, channel, length, WIDTH, ROWS)
    value = tl.load(bias + client * stride + channel, mask=channel < WIDTH, other=0.0)
    tl.store(out + at, tl.broadcast_to(value, [ROWS, LANES]), mask=inside)


@jit(do_not_specialize=["length", "stride"])
def _scale(x, factor, out, length, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    await_inputs()
    client = tl.program_id(1).to(tl.int64)
    tile, channel = own_channels(WIDTH, LANES)
    at, inside = _places(tile, channel, length, WIDTH, ROWS)
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


def spread(bias: Tensor, rows: int) -> Tensor:
    """[C, rows, channels] of which every row is that of bias [C, channels]."""
    out = bias.new_empty(len(bias), rows, bias.shape[1])
    grid, length, tile = _cut(out)
    _spread[grid](bias, out, length, bias.stride(0), *tile)
    return out


def bias_activation(x: Tensor, bias: Tensor, name: str) -> Tensor:
    """The activation ``name`` of x [C, ..., channels] plus bias [C, channels]."""
    out, (grid, length, tile) = torch.empty_like(x), _cut(x)
    _bias_activation[grid](x, bias, out, length, bias.stride(0), name, *tile)
    return out


# Of rows that a program adds up for activations of transformers, whose layers have thousands of rows.
TILES = 4


def bias_activation_backward(dout: Tensor, x: Tensor, bias: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The gradient of x, and partial sums [C, parts, channels] of which the bias's is the sum."""
    dx, dout, (_, length, tile) = torch.empty_like(x), dout.contiguous(), _cut(x)
    width, rows, lanes = tile
    tiles = 1 if name == "relu" else TILES
    parts = triton.cdiv(length, rows * tiles)
    sums = torch.empty(len(x), parts, width, dtype=torch.float32, device=x.device)
    # A thread's loads stay 16 bytes wide: half the elements' size takes half the threads.
    warps = x.element_size() if tiles == 1 else 4
    _bias_activation_backward[(parts * triton.cdiv(width, lanes), len(x))](
        dout, x, bias, dx, sums, length, bias.stride(0), name, tiles, *tile, num_warps=warps
    )
    return dx, sums


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """x [C, ..., channels] times factor [C, channels]."""
    x = x.contiguous()
    out, (grid, length, tile) = torch.empty_like(x), _cut(x)
    _scale[grid](x, factor, out, length, factor.stride(0), *tile)
    return out
