"""The kernels of language models on a frozen base against plain code; run as ``test_kernels.py`` says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, agree, kernels_run, random

from fedlada_mpi.gpu import layer_kernels
from fedlada_mpi.models import vocabulary

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


@kernels_run
@pytest.mark.parametrize("trained", ["", "table", "bias", "table and bias"])
def test_a_last_layer_as_plain_code_has_it(monkeypatch, trained):
    clients, words, tables = 3, 11, vocabulary.PaddedTables()
    monkeypatch.setattr(vocabulary, "KERNEL_BLOCK_BYTES", 64 * 4 * 7)  # several blocks
    hidden = random(clients, 2, 5, 4)
    table, bias = random(clients if "table" in trained else 1, words, 4), random(clients if trained else 1, words)
    targets = torch.randint(0, words, (clients, 2, 5), device=DEVICE)
    weight = torch.rand(clients, 2, 5, device=DEVICE) * (torch.arange(5, device=DEVICE) < 4)
    found = []
    for kernels in (None, layer_kernels, layer_kernels):
        wanted = (True, "table" in trained, "bias" in trained)
        leaves = [v.clone().requires_grad_(w) for v, w in zip((hidden, table, bias), wanted, strict=True)]
        losses = vocabulary.backward(*leaves, targets, weight, kernels, tables)
        found.append((losses, *(leaf.grad for leaf in leaves if leaf.requires_grad)))
    for expected, mine, again in zip(*found, strict=True):
        agree(mine, expected)
        assert torch.equal(mine, again)


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
