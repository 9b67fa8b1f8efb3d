"""The next token of a text, or of any other sequence."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .base import Array, Metric, Task, summed
from .checks import check_example, check_kind, check_range
from .classification import predicted

NONE = -1  # the target of a place that has no next token


def token_losses(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of outputs [N, T, V] over the tokens of each example: their sums and numbers, [N]."""
    counted = targets >= 0
    tokens = targets.long().masked_fill(~counted, 0)
    losses = -outputs.log_softmax(2).gather(2, tokens[..., None])[..., 0]
    return losses.masked_fill(~counted, 0.0).sum(1), counted.sum(1).to(outputs.dtype)


def losses_and_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """``token_losses`` as [N, 2]."""
    return torch.stack(token_losses(outputs.to(torch.float64), targets), 1)


def exp_of_mean(sums: np.ndarray) -> float:
    with np.errstate(over="ignore"):  # infinite: as bad as it gets
        return float(np.exp(sums[0] / sums[1])) if sums[1] else float("nan")


def correct(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that have the largest output, and all tokens, of each example."""
    counted = targets >= 0
    hits = counted & (predicted(outputs, 2) == targets)
    return hits.sum(1).to(torch.float64), counted.sum(1).to(torch.float64)


class NextToken(Task):
    """Targets: int [n, T], the inputs moved by one, -1 where there is no next; outputs: [N, T, V] logits."""

    name = "next-token"
    objective = "-perplexity"
    metrics = {
        "perplexity": summed(losses_and_tokens, exp_of_mean, "perplexity", larger_is_better=False),
        "acc": Metric(correct, title="accuracy", percent=True, larger_is_better=True),
    }
    losses = {"cross-entropy": "mean over tokens of minus the log of the probability of the next"}

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_losses(outputs, targets)

    def outputs(self) -> tuple[int, ...] | None:
        known = self.about.targets or self.about.inputs
        if not isinstance(known, Array) or not self.about.classes:
            return None
        return (*known.shape, self.about.classes)

    def check_targets(self, targets: np.ndarray, where: str) -> None:
        check_kind(targets, "iu", (2,), where, "the numbers of the next tokens, integers [n, length]")
        check_example(targets, None if self.about.targets is None else self.about.targets.shape, where)
        size = self.about.classes
        good = (targets >= NONE) & (targets < size) if size else targets >= NONE
        allowed = f"0 to {size - 1}" if size else "0 or more"
        check_range(targets, good, where, f"a token, {allowed}, or {NONE} where there is no next")
