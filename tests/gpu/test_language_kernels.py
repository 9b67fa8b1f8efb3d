"""The kernels of language models on a frozen base against plain code; run as ``test_kernels.py`` says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import CUDA, DEVICE, agree, kernels_run, random
from sequence_zoo import GPT, LENGTH, TEXT, TOKENS

from fedlada_mpi import models
from fedlada_mpi.gpu import layer_kernels
from fedlada_mpi.gpu.side_stream import SideStream
from fedlada_mpi.models import Lora, layers, vocabulary
from fedlada_mpi.rounds.gradients import StackedEngine
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks.client_loss import ClientLoss
from fedlada_mpi.tasks.next_token import NextToken

TYPES = (torch.float32, torch.bfloat16)
REPEATED = (layer_kernels,) if CUDA else ()  # for the same bits again, which the interpreter cannot but give
TRAINED = ["", "table and bias", *(["table", "bias"] if CUDA else [])]


@kernels_run
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("words", "width", "biased"), [(11, 64, True), (64, 64, False), (9001, 9024, True)])
def test_cross_entropy_of_tokens(words, width, biased, dtype):
    logits = 5 * random(2, 3, width, dtype=dtype)
    logits[0, 1, :words] -= 128  # whose exponentials are all zero
    bias = random(2, words, dtype=dtype) if biased else None
    targets = torch.randint(0, words, (2, 3), device=DEVICE)
    targets[1, 2], targets[0, 0] = -1, words - 1
    weight = torch.tensor([[0.5, 0.25, 0.25], [1.0, 2.0, 0.0]], device=DEVICE)
    exact = logits[..., :words].double() + (0 if bias is None else bias.double().unsqueeze(1))
    exact.requires_grad_()
    losses = F.cross_entropy(exact.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none") * weight.flatten()
    losses.sum().backward()
    copy = logits.clone()
    found = layer_kernels.token_cross_entropy(logits, bias, words, targets, weight)
    agree(found, losses.detach().view(2, 3), torch.float32)
    agree(logits[..., :words], exact.grad, dtype)
    assert not logits[..., words:].any()
    assert torch.equal(layer_kernels.token_cross_entropy(copy, bias, words, targets, weight), found)
    assert torch.equal(copy, logits)


@kernels_run
@pytest.mark.parametrize("trained", TRAINED)
def test_a_last_layer_as_plain_code_has_it(monkeypatch, trained):
    clients, words, tables = 3, 11, vocabulary.PaddedTables()
    monkeypatch.setattr(vocabulary, "KERNEL_BLOCK_BYTES", 64 * 4 * 7)  # several blocks
    hidden = random(clients, 2, 5, 4)
    table, bias = random(clients if "table" in trained else 1, words, 4), random(clients if trained else 1, words)
    targets = torch.randint(0, words, (clients, 2, 5), device=DEVICE)
    weight = torch.rand(clients, 2, 5, device=DEVICE) * (torch.arange(5, device=DEVICE) < 4)
    found = []
    for kernels in (None, layer_kernels, *REPEATED):
        wanted = (True, "table" in trained, "bias" in trained)
        leaves = [v.clone().requires_grad_(w) for v, w in zip((hidden, table, bias), wanted, strict=True)]
        losses = vocabulary.backward(*leaves, targets, weight, kernels, tables)
        found.append((losses, *(leaf.grad for leaf in leaves if leaf.requires_grad)))
    for expected, mine, *again in zip(*found, strict=True):
        agree(mine, expected)
        assert all(torch.equal(mine, other) for other in again)


@kernels_run
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "added", "affine"), [((3, 5, 24), True, True), ((2, 2, 1100), False, False)])
def test_norm_of_a_sum(shape, added, affine, dtype):
    x, other = (random(*shape, dtype=dtype) for _ in range(2))
    gamma, beta = (random(shape[-1], dtype=dtype) if affine else None for _ in range(2))
    dtotal, dout = (random(*shape, dtype=dtype) for _ in range(2))
    total, out, mean, rstd = layer_kernels.added_norm(x, other if added else None, gamma, beta, 1e-5)
    agree(total, x + other if added else x)
    exact = total.double().requires_grad_()
    weights = [None if w is None else w.double() for w in (gamma, beta)]
    expected = F.layer_norm(exact, shape[-1:], *weights, 1e-5)
    agree(out, expected.detach(), dtype)
    expected.backward(dout.double())
    arguments = (total, gamma, mean, rstd)
    agree(layer_kernels.added_norm_backward(dout, None, *arguments), exact.grad, dtype)
    found = layer_kernels.added_norm_backward(dout, dtotal, *arguments)
    agree(found, exact.grad + dtotal.double(), dtype)
    assert torch.equal(layer_kernels.added_norm_backward(dout, dtotal, *arguments), found)


@kernels_run
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "biased"), [((2, 5, 3, 24), True), ((2, 9, 1100), False)])
def test_trained_norm_of_a_sum(shape, biased, dtype):
    clients, *_, width = shape
    x, other, dtotal, dout = (random(*shape, dtype=dtype) for _ in range(4))
    gamma, beta = (random(clients, width + 40, dtype=dtype)[:, :width] for _ in range(2))  # as in a layout
    if not biased:
        beta = torch.zeros(1, width, dtype=dtype, device=DEVICE).expand(clients, width)
    total, out, mean, rstd = layer_kernels.added_norm(x, other, gamma, beta, 1e-5)
    agree(total, x + other)
    wide = [value.double().requires_grad_() for value in (total, gamma, beta)]
    rows = wide[0].view(clients, -1, width)
    exact = F.layer_norm(rows, (width,)) * wide[1].unsqueeze(1) + wide[2].unsqueeze(1)
    agree(out, exact.detach().view(shape), dtype)
    (exact.view(shape) * dout.double() + wide[0] * dtotal.double()).sum().backward()
    found = []
    for _ in range(2 if CUDA else 1):
        grads, side_stream = torch.zeros(2, clients, width, dtype=dtype, device=DEVICE), SideStream(DEVICE)
        given = (*grads,) if biased else (grads[0], None)
        dx = layer_kernels.row_norm_backward(dout, dtotal, total, gamma, mean, rstd, *given, side_stream)
        side_stream.join()
        found.append((dx, *grads))
    for mine, right in zip(found[0][: 2 + biased], (value.grad for value in wide), strict=False):
        agree(mine, right, dtype)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[-1], strict=True))


@kernels_run
@pytest.mark.parametrize("dtype", TYPES if CUDA else TYPES[:1])  # the interpreter has no products of bfloat16
@pytest.mark.parametrize(
    ("width", "ranks", "name"), [(200, (8, 8), "gelu_tanh"), (24, (3, 17), "silu"), (128, (16, 1), "gelu")]
)
def test_activation_between_adapted_layers(width, ranks, name, dtype):
    rank, other = ranks
    base, dout = (random(2, 70, width, dtype=dtype) for _ in range(2))
    inner, dinner = random(2, 70, rank, dtype=dtype), random(2, 70, other, dtype=dtype)
    flat = random(2, width * (rank + other) + 7, dtype=dtype)  # as in a layout
    b = flat[:, : width * rank].view(2, width, rank)
    a = random(1, other, width, dtype=dtype).expand(2, -1, -1)  # as a fixed one
    exact = (base.double() + inner.double() @ b.double().mT).requires_grad_()
    expected = layers.ACTIVATIONS[name](exact)
    agree(layer_kernels.low_rank_activation(base, inner, b, name), expected.detach(), dtype)
    expected.backward(dout.double() + dinner.double() @ a.double())
    found = layer_kernels.low_rank_activation_backward(dout, dinner, a, base, inner, b, name)
    agree(found, exact.grad, dtype)
    assert torch.equal(layer_kernels.low_rank_activation_backward(dout, dinner, a, base, inner, b, name), found)


@kernels_run
@pytest.mark.parametrize("dtype", TYPES if CUDA else TYPES[:1])
@pytest.mark.parametrize(("width", "rank", "biased"), [(200, 8, True), (24, 17, False)])
def test_product_of_low_rank(width, rank, biased, dtype):
    inner, bias = random(2, 70, rank, dtype=dtype), random(width, dtype=dtype) if biased else None
    b = random(2, width * rank + 7, dtype=dtype)[:, : width * rank].view(2, width, rank)  # as in a layout
    exact = inner.double() @ b.double().mT + (0 if bias is None else bias.double())
    agree(layer_kernels.low_rank_product(inner, b, bias), exact, dtype)


@kernels_run
@pytest.mark.parametrize("dtype", TYPES if CUDA else TYPES[:1])
@pytest.mark.parametrize(("length", "width", "rank"), [(300, 200, 8), (70, 24, 17)])
def test_gradients_of_low_rank(length, width, rank, dtype):
    dout, inner = (random(2, length, n, dtype=dtype) for n in (width, rank))
    b = random(2, width * rank + 7, dtype=dtype)[:, : width * rank].view(2, width, rank)  # as in a layout
    found = layer_kernels.low_rank_gradients(dout, inner, b, 0.5)
    agree(found[0], 0.5 * (dout.double() @ b.double()), dtype)
    agree(found[1].sum(1), dout.double().mT @ inner.double(), torch.float32)
    again = layer_kernels.low_rank_gradients(dout, inner, b, 0.5)
    assert all(torch.equal(mine, other) for mine, other in zip(found, again, strict=True))


@kernels_run
@pytest.mark.parametrize("lora", [Lora(2), Lora(2, fixed_a=True), None])
def test_a_transformer_and_its_adapters(lora, monkeypatch):
    """Gradients of all of it, or of adapters on a frozen base, as its layers call the kernels."""
    monkeypatch.setattr(layer_kernels, "takes_gradients", lambda dout, rank: True)
    torch.manual_seed(0)
    network = models.build(Given(GPT(depth=1)), (LENGTH, TOKENS), TEXT, lora=lora)
    values = (network.initial() + 0.1 * torch.randn(2, network.layout.size)).to(DEVICE)
    tokens = torch.randint(0, TOKENS, (2, 2, LENGTH), device=DEVICE)
    weight, keys, found = torch.full((2, 2), 0.5, device=DEVICE), torch.arange(2, device=DEVICE), []
    for kernels in (None, layer_kernels, *REPEATED):
        engine = StackedEngine(network, kernels, DEVICE, ClientLoss(NextToken(TEXT)))
        grads = torch.zeros_like(values)
        found.append((engine.gradients(values, grads, tokens, tokens, weight, keys), grads))
    (expected, gradient), mine, *again = found
    agree(mine[0], expected)
    assert (mine[1] - gradient).norm() < 1e-5 * gradient.norm()
    assert all(torch.equal(a, b) for other in again for a, b in zip(mine, other, strict=True))


def test_a_frozen_table_is_padded_once():
    tables, table = vocabulary.PaddedTables(), torch.randn(1, 70, 4)
    padded = tables(table)
    assert padded.shape == (1, 128, 4)
    assert torch.equal(padded[:, :70], table)
    assert not padded[:, 70:].any()
    assert tables(table.view(1, 70, 4)) is padded
    table[0, 3] = 5.0
    assert torch.equal(tables(table)[:, :70], table)
    assert tables(table.clone().requires_grad_()) is not tables(table.clone().requires_grad_())
    assert tables(padded) is padded
