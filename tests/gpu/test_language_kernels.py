"""The kernels of language models on a frozen base against plain code; run as ``test_kernels.py`` says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, agree, kernels_run, random
from sequence_zoo import GPT, LENGTH, TEXT, TOKENS

from fedlada_mpi import models
from fedlada_mpi.gpu import layer_kernels
from fedlada_mpi.models import vocabulary
from fedlada_mpi.rounds.gradients import StackedEngine
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks.client_loss import ClientLoss
from fedlada_mpi.tasks.next_token import NextToken

TYPES = (torch.float32, torch.bfloat16)


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


def head(kind: str) -> GPT:
    torch.manual_seed(0)
    module = GPT()
    if kind != "tied":
        module.lm_head = torch.nn.Linear(8, TOKENS).requires_grad_(kind == "own")
    if kind == "frozen table":
        module.lm_head.bias.requires_grad_()
    return module


@kernels_run
@pytest.mark.parametrize("kind", ["tied", "own", "frozen", "frozen table"])
def test_a_last_layer_as_plain_code_has_it(monkeypatch, kind):
    clients, examples = 3, 4
    monkeypatch.setattr(vocabulary, "LARGE", TOKENS)
    monkeypatch.setattr(vocabulary, "KERNEL_BLOCK_BYTES", 64 * 4 * clients * 7)  # several blocks
    network = models.build(Given(head(kind)), (LENGTH, TOKENS), TEXT)
    assert network.forward.training.head is not None
    inputs, targets = (torch.randint(0, TOKENS, (clients, examples, LENGTH), device=DEVICE) for _ in range(2))
    targets[0, :2, 3:] = -1
    weight = torch.full((clients, examples), 1 / 3, device=DEVICE)
    weight[:, -1] = 0
    values = (network.initial() + 0.1 * torch.randn(clients, network.layout.size)).to(DEVICE)
    found = []
    for kernels in (None, layer_kernels, layer_kernels):
        engine = StackedEngine(network, kernels, DEVICE, ClientLoss(NextToken(TEXT)))
        grads, keys = torch.full_like(values, 7.0), torch.arange(clients, device=DEVICE)
        for _ in range(2):  # the second time with the padded table of the first
            losses = engine.gradients(values, grads, inputs, targets, weight, keys)
        found.append((losses, grads))
    (expected, expected_grads), (losses, grads), again = found
    agree(losses, expected)
    assert (grads - expected_grads).norm() < 1e-5 * expected_grads.norm()
    assert torch.equal(again[0], losses)
    assert torch.equal(again[1], grads)


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
