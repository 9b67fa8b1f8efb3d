"""One step of an RNN, GRU or LSTM of all clients, forward and backward, in memory that is there already.

``product`` [C, T, N, gates] has the states' products, with all that is added to them; ``states`` and ``cells``
[C, T + 1, N, size] one more place than there are steps. A step ``t`` reads the place ``before`` and writes the place
``after``, and may write into ``product`` and ``given`` what its gradient needs. Backward, ``dstate`` [C, N, size] is
the gradient by way of the next step's product, and ``carry`` that by way of the cell, or past the gates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

sigmoid_backward = torch.ops.aten.sigmoid_backward
tanh_backward = torch.ops.aten.tanh_backward


class CellKernels(Protocol):
    """The steps below, compiled; ``gpu/layer_kernels.py`` has them."""

    def lstm(self, product: Tensor, states: Tensor, cells: Tensor, t: int, before: int, after: int) -> None: ...

    def lstm_backward(
        self, product: Tensor, states: Tensor, cells: Tensor, dout: Tensor, dstate: Tensor, carry: Tensor,
        dproduct: Tensor, t: int, before: int, after: int,
    ) -> None: ...  # fmt: skip

    def gru(self, product: Tensor, states: Tensor, given: Tensor, t: int, before: int, after: int) -> None: ...

    def gru_backward(
        self, product: Tensor, states: Tensor, given: Tensor, dout: Tensor, dstate: Tensor, carry: Tensor,
        dproduct: Tensor, dgiven: Tensor, t: int, before: int, after: int,
    ) -> None: ...  # fmt: skip


def lstm(product: Tensor, states: Tensor, cells: Tensor, t: int, before: int, after: int) -> None:
    size, gates = states.shape[-1], product[:, t]
    gates[..., : 2 * size].sigmoid_()
    gates[..., 2 * size : 3 * size].tanh_()
    gates[..., 3 * size :].sigmoid_()
    i, f, g, o = gates.chunk(4, -1)
    c = torch.mul(f, cells[:, before], out=cells[:, after]).addcmul_(i, g)
    torch.tanh(c, out=states[:, after]).mul_(o)


def lstm_backward(
    product: Tensor, states: Tensor, cells: Tensor, dout: Tensor, dstate: Tensor, carry: Tensor, dproduct: Tensor,
    t: int, before: int, after: int,
) -> None:  # fmt: skip
    (i, f, g, o), (di, df, dg, do) = product[:, t].chunk(4, -1), dproduct[:, t].chunk(4, -1)
    dh, height = dstate.add_(dout[:, t]), torch.tanh(cells[:, after])
    dc = carry.add_(tanh_backward(dh * o, height))
    sigmoid_backward(dh * height, o, grad_input=do)
    sigmoid_backward(dc * g, i, grad_input=di)
    sigmoid_backward(dc * cells[:, before], f, grad_input=df)
    tanh_backward(dc * i, g, grad_input=dg)
    dc.mul_(f)


def gru(product: Tensor, states: Tensor, given: Tensor, t: int, before: int, after: int) -> None:
    """``given`` [C, T, N, gates]: the inputs' products, as the reset gate acts on the states' alone."""
    size = states.shape[-1]
    gates, x = product[:, t], given[:, t]
    gates[..., : 2 * size].add_(x[..., : 2 * size]).sigmoid_()
    r, z, hn = gates.chunk(3, -1)
    n = x[..., 2 * size :].addcmul_(r, hn).tanh_()
    torch.lerp(n, states[:, before], z, out=states[:, after])


def gru_backward(
    product: Tensor, states: Tensor, given: Tensor, dout: Tensor, dstate: Tensor, carry: Tensor, dproduct: Tensor,
    dgiven: Tensor, t: int, before: int, after: int,
) -> None:  # fmt: skip
    size = states.shape[-1]
    (r, z, hn), n = product[:, t].chunk(3, -1), given[:, t, :, 2 * size :]
    dr, dz, dn = dgiven[:, t].chunk(3, -1)
    dh = dstate.add_(dout[:, t]).add_(carry)
    torch.mul(dh, z, out=carry)
    tanh_backward(dh - carry, n, grad_input=dn)
    sigmoid_backward(dh * (states[:, before] - n), z, grad_input=dz)
    sigmoid_backward(dn * hn, r, grad_input=dr)
    dproduct[:, t, :, : 2 * size] = dgiven[:, t, :, : 2 * size]
    torch.mul(dn, r, out=dproduct[:, t, :, 2 * size :])


def rnn_tanh(product: Tensor, states: Tensor, t: int, before: int, after: int) -> None:
    torch.tanh(product[:, t], out=states[:, after])


def rnn_tanh_backward(
    product: Tensor, states: Tensor, dout: Tensor, dstate: Tensor, dproduct: Tensor, t: int, before: int, after: int
) -> None:
    tanh_backward(dstate.add_(dout[:, t]), states[:, after], grad_input=dproduct[:, t])


def rnn_relu(product: Tensor, states: Tensor, t: int, before: int, after: int) -> None:
    torch.clamp_min(product[:, t], 0, out=states[:, after])


def rnn_relu_backward(
    product: Tensor, states: Tensor, dout: Tensor, dstate: Tensor, dproduct: Tensor, t: int, before: int, after: int
) -> None:
    torch.mul(dstate.add_(dout[:, t]), states[:, after] > 0, out=dproduct[:, t])


Step = Callable[..., None]
PLAIN: dict[str, tuple[Step, Step]] = {
    "LSTM": (lstm, lstm_backward),
    "GRU": (gru, gru_backward),
    "RNN_TANH": (rnn_tanh, rnn_tanh_backward),
    "RNN_RELU": (rnn_relu, rnn_relu_backward),
}


def steps_of(mode: str, kernels: CellKernels | None) -> tuple[Step, Step]:
    """A step forward and one backward."""
    if kernels is not None and mode == "LSTM":
        return kernels.lstm, kernels.lstm_backward
    if kernels is not None and mode == "GRU":
        return kernels.gru, kernels.gru_backward
    return PLAIN[mode]
