"""The loss of clients' batches, from a task's loss of examples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from ..support import autograd
from .base import Loss, Task
from .next_token import NextToken

COUNTED = 64  # examples at once, as outputs may be large


def wide(outputs: Tensor) -> Tensor:
    """In the precision that losses are computed in: float32, or double."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def stored_as(dtype: str, floats: torch.dtype = torch.float32) -> torch.dtype:
    """The type in which a rank holds targets that numpy calls ``dtype``; ``floats``: that of floating-point numbers."""
    if dtype.startswith("float"):
        return floats
    return torch.bool if dtype == "bool" else torch.int64


class ClientLoss:
    """Losses [C] of outputs [C, N, ...]; ``weight`` [C, N] is 1/n of a batch of n examples, and 0 for padding.

    Where all examples of a client are divided among several batches, weights are 1/n of all of them: the losses of the
    batches then add up to the client's; those of sums and counts with the weights of ``by_counts``.
    """

    def __init__(self, task: Task):
        self.task = task

    def __call__(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        found = self._found(outputs, targets, weight)
        return found if found.ndim == 1 else (found * weight).sum(-1)

    def backward(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """The losses, after their gradients have gone back through ``outputs``."""
        found = self._found(outputs, targets, weight)
        if found.ndim == 1:
            found.sum().backward()
            return found.detach()
        # As from the weighted sums, whose steps would take longer than those of a small model.
        autograd.backward([found], [weight.to(found.dtype)])
        return (found.detach() * weight).sum(-1)

    def _found(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        """The losses of all examples [C, N] or, where examples do not have their own, of the batches [C]."""
        outputs, shape = wide(outputs), weight.shape
        if self.task.batch_loss is not None:
            losses = vmap(self.task.batch_loss, randomness="error")(outputs, targets, weight > 0)
            return losses * weight.sum(-1)
        found = self.task.loss(outputs.flatten(0, 1), targets.flatten(0, 1))
        if isinstance(found, tuple):
            sums, counts = (each.view(shape) * (weight > 0) for each in found)
            return quotient(sums.sum(-1), counts.sum(-1)) * weight.sum(-1)
        return of_examples(found).view(shape)

    def token_weights(self, targets: Tensor, weight: Tensor) -> Tensor | None:
        """[C, N, T], where a client's loss is the sum of its tokens' cross-entropies times these; None otherwise."""
        if self.task.batch_loss is not None or getattr(self.task.loss, "__func__", None) is not NextToken.loss:
            return None
        counted = (targets >= 0) & (weight > 0).unsqueeze(-1)
        means = quotient(weight.sum(-1), counted.sum((1, 2)).to(weight.dtype))
        return counted * means.view(-1, 1, 1)

    def counts(self, targets: Tensor, output_shape: tuple[int, ...]) -> Tensor | None:
        """Of a loss that gives sums and counts, the counts [N]; they do not depend on the outputs."""
        if self.task.batch_loss is not None or not len(targets):
            return None
        loss = self.task.loss(torch.zeros(len(targets), *output_shape, device=targets.device), targets)
        return loss[1].double() if isinstance(loss, tuple) else None

    def targets_like(self, *lead: int) -> Tensor:
        """Zeros of the form of targets, [*lead, ...]."""
        array = self.task.about.targets
        assert array is not None
        return torch.zeros(*lead, *array.shape, dtype=stored_as(array.dtype))


def quotient(sums: Tensor, counts: Tensor) -> Tensor:
    """The mean, 0 of nothing; counts may be weights, below 1."""
    return sums / counts.masked_fill(counts == 0, 1)


def of_examples(found: Loss) -> Tensor:
    """[N] from what a task's loss gives."""
    if isinstance(found, tuple):
        return quotient(*found)
    return found if found.ndim == 1 else found.flatten(1).mean(1)


class CrossEntropy(ClientLoss):
    """Of a class for every example; compiled kernels have it, too."""

    def __init__(self) -> None:
        pass

    def _found(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        logits = wide(outputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)

    def token_weights(self, targets: Tensor, weight: Tensor) -> None:
        return None

    def counts(self, targets: Tensor, output_shape: tuple[int, ...]) -> None:
        return None

    def targets_like(self, *lead: int) -> Tensor:
        return torch.zeros(lead, dtype=torch.int64)


CROSS_ENTROPY = CrossEntropy()
