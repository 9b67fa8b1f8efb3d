"""A last layer over a large vocabulary: its loss in blocks of tokens is the loss of all logits."""

from __future__ import annotations

import pytest
import torch
from sequence_zoo import GPT, LENGTH, TEXT, TOKENS
from torch.utils._python_dispatch import TorchDispatchMode

from fedlada_mpi import models
from fedlada_mpi.models import vocabulary
from fedlada_mpi.rounds.gradients import GenericEngine, StackedEngine
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks.client_loss import ClientLoss
from fedlada_mpi.tasks.next_token import NextToken

CLIENTS, EXAMPLES = 3, 4


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor with the vocabulary as an axis, but for the layer itself."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (TOKENS,):
            self.elements = max(self.elements, out.numel())
        return out


def model(kind: str) -> GPT:
    torch.manual_seed(0)
    module = GPT()
    if kind != "tied":
        module.lm_head = torch.nn.Linear(8, TOKENS).requires_grad_(kind == "own")
    return module


@pytest.mark.parametrize("kind", ["tied", "own", "frozen"])
def test_in_blocks(monkeypatch, kind):
    monkeypatch.setattr(vocabulary, "LARGE", TOKENS)
    monkeypatch.setattr(vocabulary, "BLOCK_BYTES", 4 * CLIENTS * TOKENS * 5)  # five of 24 tokens
    task = NextToken(TEXT)
    plain = models.build(Given(model(kind)), (LENGTH, TOKENS), TEXT, stacked=False)
    network = models.build(Given(model(kind)), (LENGTH, TOKENS), TEXT)
    assert network.forward.training.head is not None
    draw = torch.Generator().manual_seed(2)
    inputs, targets = (torch.randint(0, TOKENS, (CLIENTS, EXAMPLES, LENGTH), generator=draw) for _ in range(2))
    targets[0, :2, 3:] = -1
    weight = torch.full((CLIENTS, EXAMPLES), 1 / 3, dtype=torch.float64)
    weight[:, -1] = 0
    found = []
    for engine in (StackedEngine(network, loss=ClientLoss(task)), GenericEngine(plain, loss=ClientLoss(task))):
        layout = engine.network.layout
        values = torch.stack([layout.pack(dict(plain.module.named_parameters()), torch.float64)] * CLIENTS)
        grads = torch.full_like(values, 7.0)
        with Largest() as largest:
            losses = engine.gradients(values, grads, inputs, targets, weight, torch.arange(CLIENTS))
        found.append((losses, [layout.unpack(row) for row in grads], largest.elements))
    (losses, grads, elements), (expected, expected_grads, _) = found
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-12, msg=name)
    assert 0 < elements < CLIENTS * EXAMPLES * LENGTH * TOKENS // 2


def test_small_vocabularies_and_other_losses_are_computed_whole():
    network = models.build(Given(model("own")), (LENGTH, TOKENS), TEXT)
    assert network.forward.training.head is None

    class Smoothed(NextToken):
        def loss(self, outputs, targets):
            return super().loss(0.9 * outputs, targets)

    targets, weight = torch.zeros(1, 2, 3, dtype=torch.int64), torch.tensor([[1.5, 0.0]])
    assert ClientLoss(Smoothed(TEXT)).token_weights(targets, weight) is None
    assert ClientLoss(NextToken(TEXT)).token_weights(targets, weight).tolist() == [[[0.5] * 3, [0.0] * 3]]
