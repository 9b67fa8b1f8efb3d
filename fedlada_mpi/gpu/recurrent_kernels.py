"""One step of an LSTM or GRU of all clients, without its product: one launch forward and one backward.

The functions stand in for those of ``models/cells.py``, and leave the products as they are: backward computes the gates
from them again, in float32, which takes less time than to store them.
"""

from __future__ import annotations

from torch import Tensor

from .channel_kernels import tanh
from .triton_support import await_inputs, check, jit, tl, triton

BLOCK = 256  # units of a program: the few rows of a step are spread over the whole GPU
INTEGERS = ["steps", "rows", "t", "before", "after"]


@jit
def _sigmoid(value):
    return 1 / (1 + tl.exp(-value))


@jit
def _place(steps, rows, t, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The places of a program's units in the step ``t`` of tensors [C, steps, rows, WIDTH], where each has SIZE."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return (client * steps + t) * rows * WIDTH + (at // SIZE * WIDTH + at % SIZE)


@jit
def _units(rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Which of a program's units there are."""
    return tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) < rows * SIZE


@jit
def _read(tensor, at, inside):
    return tl.load(tensor + at, mask=inside, other=0.0).to(tl.float32)


@jit
def _write(tensor, at, value, inside):
    tl.store(tensor + at, value.to(tensor.dtype.element_ty), mask=inside)


@jit
def _lstm_gates(product, gate, inside, SIZE: tl.constexpr):
    i, f = _sigmoid(_read(product, gate, inside)), _sigmoid(_read(product, gate + SIZE, inside))
    g, o = tanh(_read(product, gate + 2 * SIZE, inside)), _sigmoid(_read(product, gate + 3 * SIZE, inside))
    return i, f, g, o


@jit(do_not_specialize=INTEGERS)
def _lstm(product, states, cells, steps, rows, t, before, after, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    await_inputs()
    inside = _units(rows, SIZE, BLOCK)
    old, new = (
        _place(steps + 1, rows, before, SIZE, SIZE, BLOCK),
        _place(steps + 1, rows, after, SIZE, SIZE, BLOCK),
    )
    i, f, g, o = _lstm_gates(product, _place(steps, rows, t, 4 * SIZE, SIZE, BLOCK), inside, SIZE)
    c = f * _read(cells, old, inside) + i * g
    _write(cells, new, c, inside)
    _write(states, new, o * tanh(c), inside)


@jit(do_not_specialize=INTEGERS)
def _lstm_backward(
    product, cells, dout, dstate, carry, dproduct, steps, rows, t, before, after, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    await_inputs()
    inside = _units(rows, SIZE, BLOCK)
    old, new = (
        _place(steps + 1, rows, before, SIZE, SIZE, BLOCK),
        _place(steps + 1, rows, after, SIZE, SIZE, BLOCK),
    )
    gate, unit = _place(steps, rows, t, 4 * SIZE, SIZE, BLOCK), _place(1, rows, 0, SIZE, SIZE, BLOCK)
    i, f, g, o = _lstm_gates(product, gate, inside, SIZE)
    height = tanh(_read(cells, new, inside))
    dh = _read(dout, _place(steps, rows, t, SIZE, SIZE, BLOCK), inside) + _read(dstate, unit, inside)
    dc = _read(carry, unit, inside) + dh * o * (1 - height * height)
    _write(dproduct, gate, dc * g * i * (1 - i), inside)
    _write(dproduct, gate + SIZE, dc * _read(cells, old, inside) * f * (1 - f), inside)
    _write(dproduct, gate + 2 * SIZE, dc * i * (1 - g * g), inside)
    _write(dproduct, gate + 3 * SIZE, dh * height * o * (1 - o), inside)
    _write(carry, unit, dc * f, inside)


@jit
def _gru_gates(product, given, gate, inside, SIZE: tl.constexpr):
    r = _sigmoid(_read(product, gate, inside) + _read(given, gate, inside))
    z = _sigmoid(_read(product, gate + SIZE, inside) + _read(given, gate + SIZE, inside))
    candidate = _read(product, gate + 2 * SIZE, inside)
    return r, z, candidate, tanh(_read(given, gate + 2 * SIZE, inside) + r * candidate)


@jit(do_not_specialize=INTEGERS)
def _gru(product, states, given, steps, rows, t, before, after, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    await_inputs()
    inside = _units(rows, SIZE, BLOCK)
    old, new = (
        _place(steps + 1, rows, before, SIZE, SIZE, BLOCK),
        _place(steps + 1, rows, after, SIZE, SIZE, BLOCK),
    )
    _, z, _, n = _gru_gates(product, given, _place(steps, rows, t, 3 * SIZE, SIZE, BLOCK), inside, SIZE)
    _write(states, new, n + z * (_read(states, old, inside) - n), inside)


@jit(do_not_specialize=INTEGERS)
def _gru_backward(
    product, states, given, dout, dstate, carry, dproduct, dgiven, steps, rows, t, before, after, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    await_inputs()
    inside = _units(rows, SIZE, BLOCK)
    old = _place(steps + 1, rows, before, SIZE, SIZE, BLOCK)
    gate, unit = _place(steps, rows, t, 3 * SIZE, SIZE, BLOCK), _place(1, rows, 0, SIZE, SIZE, BLOCK)
    r, z, candidate, n = _gru_gates(product, given, gate, inside, SIZE)
    dh = _read(dout, _place(steps, rows, t, SIZE, SIZE, BLOCK), inside) + _read(dstate, unit, inside)
    dh += _read(carry, unit, inside)
    dn = dh * (1 - z) * (1 - n * n)
    dz = dh * (_read(states, old, inside) - n) * z * (1 - z)
    dr = dn * candidate * r * (1 - r)
    _write(dgiven, gate, dr, inside)
    _write(dgiven, gate + SIZE, dz, inside)
    _write(dgiven, gate + 2 * SIZE, dn, inside)
    _write(dproduct, gate, dr, inside)
    _write(dproduct, gate + SIZE, dz, inside)
    _write(dproduct, gate + 2 * SIZE, dn * r, inside)
    _write(carry, unit, dh * z, inside)


def _cut(product: Tensor, states: Tensor) -> tuple[tuple[int, int], tuple[int, int], int]:
    """The programs of a step, the steps and rows of a client, and the size of a state."""
    check("recurrent layer", product, states)
    count, steps, rows, _ = product.shape
    size = states.shape[-1]
    return (triton.cdiv(rows * size, BLOCK), count), (steps, rows), size


def lstm(product: Tensor, states: Tensor, cells: Tensor, t: int, before: int, after: int) -> None:
    grid, shape, size = _cut(product, states)
    _lstm[grid](product, states, cells, *shape, t, before, after, size, BLOCK)


def lstm_backward(
    product: Tensor, states: Tensor, cells: Tensor, dout: Tensor, dstate: Tensor, carry: Tensor, dproduct: Tensor,
    t: int, before: int, after: int,
) -> None:  # fmt: skip
    grid, shape, size = _cut(product, states)
    places = (*shape, t, before, after)
    _lstm_backward[grid](product, cells, dout, dstate, carry, dproduct, *places, size, BLOCK)


def gru(product: Tensor, states: Tensor, given: Tensor, t: int, before: int, after: int) -> None:
    grid, shape, size = _cut(product, states)
    _gru[grid](product, states, given, *shape, t, before, after, size, BLOCK)


def gru_backward(
    product: Tensor, states: Tensor, given: Tensor, dout: Tensor, dstate: Tensor, carry: Tensor, dproduct: Tensor,
    dgiven: Tensor, t: int, before: int, after: int,
) -> None:  # fmt: skip
    grid, shape, size = _cut(product, states)
    gradients, places = (dout, dstate, carry, dproduct, dgiven), (*shape, t, before, after)
    _gru_backward[grid](product, states, given, *gradients, *places, size, BLOCK)
