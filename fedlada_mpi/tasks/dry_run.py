"""A user's task tried on a few examples of the data, before a run writes anything: what cannot train is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..support.errors import UserError, shortened
from ..support.user_code import users_code
from .base import Task
from .client_loss import ClientLoss, of_examples, wide
from .scores import Scores

CLOSE = 1e-4  # of a loss, alone and among others


def dry_run(name: str, task: Task, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a task whose loss of examples [N, ...] is not one number of each, finite and with a gradient."""
    what, present = f"--task {name}", torch.ones(len(outputs), dtype=torch.bool)
    outputs = wide(outputs).detach().requires_grad_()
    with torch.enable_grad(), users_code(what, "a loss of (outputs, targets)"):
        if task.batch_loss is not None:
            loss = task.batch_loss(outputs, targets, present)
            _check_number(what, loss)
            _refuse_padding(what, task.batch_loss, outputs, targets, present, loss)
        else:
            found = task.loss(outputs, targets)
            _check_loss(what, found, len(outputs))
            _check_counts(what, task, found, outputs, targets)
            loss = of_examples(found).sum()
        if not loss.isfinite():
            raise UserError(
                f"{what}: the loss of the first examples is {float(loss.detach())}: expected finite numbers"
            )
        if task.batch_loss is None:
            _refuse_mixed(what, task, outputs, targets, found)
    if not loss.requires_grad:
        raise UserError(f"{what}: its loss has no gradient: leave out torch.no_grad(), .detach(), .item() and numpy")
    with users_code(what, "a loss that autograd can differentiate"):
        (gradient,) = torch.autograd.grad(loss, outputs, allow_unused=True)
    if gradient is None or not gradient.isfinite().all():
        raise UserError(f"{what}: the gradient of its loss is not finite on the first examples")
    with users_code(what, "a loss that does without .item(), and acts on all clients' examples at once"):
        ClientLoss(task)(outputs[None].detach(), targets[None], present[None] / len(outputs))
    scores = Scores(task, tuple(outputs.shape[1:]))
    first, again = (scores.totals(outputs.detach(), targets) for _ in range(2))
    differ = ~first.isclose(again, rtol=CLOSE, equal_nan=True)
    if differ.any():
        column = scores.columns[int(differ.nonzero()[0])]
        raise UserError(f"{what}: two calls on the same examples differ in {column}: keep no state, and draw nothing")
    _refuse_mixed_metrics(what, scores, outputs.detach(), targets)


def _check_number(what: str, loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.ndim:
        raise UserError(f"{what}: got {_shown(loss)} from batch_loss, expected a tensor with one number, of the batch")


def _check_loss(what: str, found: Any, count: int) -> None:
    parts = found if isinstance(found, tuple) and len(found) == 2 else (found,)
    for part in parts:
        if not isinstance(part, Tensor) or part.ndim == 0 or len(part) != count or (len(parts) == 2 and part.ndim > 1):
            raise UserError(
                f"{what}: got {_shown(part)} from its loss for {count} examples, expected the loss of each, [{count}]: "
                'leave out .mean(), as with reduction="none"; or the sums and counts of each'
            )


def _check_counts(what: str, task: Task, found: Any, outputs: Tensor, targets: Tensor) -> None:
    """Of a loss of sums and counts, the counts: those of all examples are known before there are outputs."""
    if not isinstance(found, tuple):
        return
    counts = found[1].detach()
    if not (counts >= 0).all():
        raise UserError(f"{what}: got counts {shortened(counts.tolist())} from its loss, expected 0 or more")
    others = task.loss(torch.zeros_like(outputs), targets)
    if not torch.equal(others[1].detach(), counts):
        raise UserError(
            f"{what}: the counts of its loss depend on the outputs, expected them to depend on targets only"
        )


def _refuse_padding(
    what: str, batch_loss: Callable[..., Any], outputs: Tensor, targets: Tensor, present: Tensor, loss: Tensor
) -> None:
    """Batches are padded, so what ``present`` leaves out may not count."""
    longer = [torch.cat([part, part.flip(0)[:1]]) for part in (outputs, targets)]
    padded = batch_loss(*longer, torch.cat([present, ~present[:1]]))
    if not torch.allclose(padded, loss, rtol=CLOSE, atol=1e-6):
        raise UserError(
            f"{what}: batch_loss counts padding: expected it to leave out examples whose present is False, as by "
            "(losses * present).sum() / present.sum()"
        )


def _refuse_mixed(what: str, task: Task, outputs: Tensor, targets: Tensor, found: Any) -> None:
    """Batches are padded, so an example's loss may not depend on the others."""
    alone = torch.cat([of_examples(task.loss(outputs[i : i + 1], targets[i : i + 1])) for i in range(len(outputs))])
    together = of_examples(found)
    if not torch.allclose(alone, together, rtol=CLOSE, atol=CLOSE * float(together.detach().abs().mean())):
        shapes = list(outputs.shape), list(targets.shape)
        if shapes[0] != shapes[1] and isinstance(found, Tensor) and found.shape == (len(outputs), len(outputs)):
            raise UserError(
                f"{what}: its loss of outputs {shapes[0]} and targets {shapes[1]} is {list(found.shape)}: make their "
                "shapes equal first, as by outputs[:, 0]"
            )
        raise UserError(
            f"{what}: the loss of an example depends on the others of its batch: give batch_loss(outputs, targets, "
            "present) instead, with present False for padding"
        )


def _refuse_mixed_metrics(what: str, scores: Scores, outputs: Tensor, targets: Tensor) -> None:
    """Metrics are added up over batches of any size, so an example's may not depend on the others."""
    half = len(outputs) // 2
    if not half:
        return
    halves = [scores.each(outputs[part], targets[part]) for part in (slice(None, half), slice(half, None))]
    together, apart = scores.each(outputs, targets), torch.cat(halves, 1)
    for column, whole, own in zip(scores.columns, together, apart, strict=True):
        of_loss = column.partition(".")[0] == "loss"  # which is tried by itself
        size = float(whole.abs().nan_to_num(posinf=0.0).mean())
        if not of_loss and not own.allclose(whole, CLOSE, CLOSE * size, equal_nan=True):
            raise UserError(
                f"{what}: {column} of an example depends on the others of its batch: make the shapes of outputs and "
                "targets equal first, as by outputs[:, 0], or give fedlada_mpi.whole(function)"
            )


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else shortened(value)
