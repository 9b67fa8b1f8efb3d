"""The kernels of recurrent layers and of tables against plain code; on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import CUDA, DEVICE, agree, kernels_run, poison  # noqa: F401
from torch import nn

from fedlada_mpi.gpu import layer_kernels
from fedlada_mpi.models.recurrent import recurrent

pytestmark = kernels_run
# The interpreter takes seconds for each: there, every kind, width and type once, and no second time for the same bits.
LAYERS = [(nn.LSTM, torch.float32), (nn.GRU, torch.bfloat16)]
LAYERS += [(nn.LSTM, torch.bfloat16), (nn.GRU, torch.float32)] if CUDA else []
TABLES = [(False, torch.float32), (True, torch.bfloat16)]
TABLES += [(True, torch.float32), (False, torch.bfloat16)] if CUDA else []


@pytest.mark.parametrize(("kind", "dtype"), LAYERS)
def test_recurrent_layers_as_without_kernels(kind, dtype):
    """With more units in a step than a program has, of several layers and both directions, from given states."""
    clients, rows, steps, size = 2, 3, 3 if CUDA else 2, 90
    torch.manual_seed(0)
    layer = kind(6, size, 2, batch_first=True, bidirectional=True)
    values = {n: v.detach() + 0.1 * torch.randn(clients, *v.shape) for n, v in layer.named_parameters()}
    x, h, c = torch.randn(clients, rows, steps, 6), *torch.randn(2, clients, 4, rows, size)
    factor = torch.randn(clients, rows, steps, 2 * size, device=DEVICE)

    def gradients(compute, kernels):
        leaves = [v.to(DEVICE, dtype).to(compute).requires_grad_() for v in (*values.values(), x, h, c)]
        parameters, given, states = dict(zip(values, leaves, strict=False)), leaves[-3], leaves[-2:]
        initial = tuple(states) if kind is nn.LSTM else states[0]
        out, last = recurrent(layer, parameters, given, initial, lambda value: value, True, kernels)
        last = last if kind is nn.LSTM else (last, last)
        loss = (out * factor.to(compute)).sum() + sum(state.square().sum() for state in last)
        used = leaves if kind is nn.LSTM else leaves[:-1]
        return [out, *last, *torch.autograd.grad(loss, used)]

    close = 2e-6 if dtype == torch.float32 else 2e-2
    found, expected = gradients(dtype, layer_kernels), gradients(torch.float64, None)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < close * b.norm()
    if CUDA:
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(dtype, layer_kernels), strict=True))


def repeated(*counts: int) -> torch.Tensor:
    """Row i of a table, counts[i] times, in any order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("places", "rows", "width"),
    [
        (repeated(1, 0, 31, 32, 33, 0, 64, 65, 34, 40), 12, 8),
        (repeated(1100, 2), 2, 20),  # more pieces than a program adds up at a time
        (repeated(*[0, 1, 0, 3] * 5), 20, 150),
    ],
)
@pytest.mark.parametrize(("by_frequency", "dtype"), TABLES)
def test_gradient_of_a_table(places, rows, width, by_frequency, dtype):
    places = places.to(DEVICE)
    dout = torch.randn(len(places), width).to(DEVICE, dtype)
    found = layer_kernels.embedding_gradient(dout, places, rows, by_frequency)
    counts = F.one_hot(places, rows).double()
    expected = counts.mT @ dout.double()
    if by_frequency:
        expected /= counts.sum(0).clamp(min=1).unsqueeze(1)
    agree(found, expected, dtype)
    if CUDA:
        assert torch.equal(found, layer_kernels.embedding_gradient(dout, places, rows, by_frequency))


def test_gradient_of_a_table_of_which_nothing_is_taken():
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    found = layer_kernels.embedding_gradient(torch.zeros(0, 5, device=DEVICE), nothing, 3, False)
    assert torch.equal(found, torch.zeros(3, 5, device=DEVICE))
