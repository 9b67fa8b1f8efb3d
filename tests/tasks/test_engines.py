"""Every built-in loss on both engines, with padded batches, against a plain loop over clients in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlada_mpi import models, tasks
from fedlada_mpi.rounds.gradients import GenericEngine, StackedEngine
from fedlada_mpi.tasks import About, Array, Task

SIZES = (5, 3, 1)  # examples of the clients' batches, which are padded to the first
EDGES = (1.0, 2.0, 4.0)
FEATURES = Array("float32", (4,))


def about(targets: Array, inputs: Array = FEATURES, **more) -> About:
    return About(inputs, targets, **more)


CASES = {
    "classification": (about(Array("int64"), classes=3), "mlp", ""),
    "multilabel": (about(Array("bool", (3,))), "mlp", ""),
    **{
        f"regression {loss}": (about(Array("float32", (2,))), "mlp", loss)
        for loss in ("squared", "absolute", "huber", "poisson")
    },
    "segmentation": (about(Array("uint8", (4, 3)), Array("float32", (2, 4, 3)), classes=3), "fcn", ""),
    "next-token": (about(Array("int64", (6,)), Array("int64", (6,), 5), classes=5), "causal_cnn", ""),
    "survival discrete": (about(Array("float32", (2,)), edges=EDGES), "linear", "discrete"),
    "survival cox": (about(Array("float32", (2,))), "linear", "cox"),
}


def targets_of(task: Task, *lead: int) -> torch.Tensor:
    draw, shape = torch.Generator().manual_seed(1), task.about.targets.shape
    match task.name:
        case "classification":
            return torch.randint(3, lead, generator=draw)
        case "multilabel":
            return torch.rand(*lead, *shape, generator=draw) < 0.4
        case "segmentation":
            drawn = torch.randint(4, (*lead, *shape), generator=draw)
            return torch.where(drawn == 3, 255, drawn)
        case "next-token":
            return torch.randint(-1, 5, (*lead, *shape), generator=draw)
        case "survival":
            event, time = torch.rand(2, *lead, generator=draw, dtype=torch.float64)
            return torch.stack([(event < 0.7).double(), 5 * time], -1)
    return torch.rand(*lead, *shape, generator=draw, dtype=torch.float64) * 3


def plain_loss(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of one client's examples, without padding."""
    if task.batch_loss is not None:
        return task.batch_loss(outputs, targets, torch.ones(len(outputs), dtype=torch.bool))
    found = task.loss(outputs, targets)
    return found[0].sum() / found[1].sum() if isinstance(found, tuple) else found.mean()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "generic"])
def test_losses_and_gradients_are_those_of_a_loop(case, stacked):
    described, model, loss = CASES[case]
    task = tasks.create(case.split()[0], described, loss)
    network = models.build(model, task.outputs(), described, seed=3, stacked=stacked)
    assert (network.forward is not None) == stacked
    clients, width, draw = len(SIZES), SIZES[0], torch.Generator().manual_seed(0)
    inputs = network.form.random(clients, width, draw=draw, dtype=torch.float64)
    targets = targets_of(task, clients, width)
    initial = network.initial(torch.float64)
    values = initial + 0.1 * torch.randn(clients, len(initial), generator=draw, dtype=torch.float64)
    weight = torch.zeros(clients, width, dtype=torch.float64)
    for client, size in enumerate(SIZES):
        weight[client, :size] = 1 / size

    loss_of_clients = tasks.client_loss(task)
    engine = StackedEngine(network, loss=loss_of_clients) if stacked else GenericEngine(network, loss=loss_of_clients)
    if stacked:
        values[:, network.layout.live :] = 0
    grads = torch.zeros_like(values)
    losses = engine.gradients(values, grads, inputs, targets, weight, torch.arange(clients))

    for client, size in enumerate(SIZES):
        module: nn.Module = network.module.double()
        state = network.layout.unpack(values[client])
        leaves = {name: value.detach().clone().requires_grad_() for name, value in state.items()}
        outputs = torch.func.functional_call(module, leaves, (inputs[client, :size],))
        expected = plain_loss(task, outputs, targets[client, :size])
        gradients = torch.autograd.grad(expected, list(leaves.values()), allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(losses[client], expected.detach(), rtol=1e-12, atol=1e-12)
        found = network.layout.unpack(grads[client])
        for name, gradient in zip(leaves, gradients, strict=True):
            torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-12, msg=f"{case}: {name}")


def test_batches_of_one_client_add_up_to_its_loss():
    """As where a method takes the full gradient: weights are 1/n of all examples."""
    task = tasks.create("regression", about(Array("float32")))
    loss = tasks.client_loss(task)
    outputs, targets = torch.tensor([[1.0], [2.0], [4.0]]).double(), torch.tensor([0.0, 0.0, 1.0]).double()
    first = loss(outputs[None, :2], targets[None, :2], torch.full((1, 2), 1 / 3, dtype=torch.float64))
    second = loss(outputs[None, 2:], targets[None, 2:], torch.full((1, 1), 1 / 3, dtype=torch.float64))
    assert float(first + second) == pytest.approx((1 + 4 + 9) / 3, abs=1e-15)


def test_sums_and_counts_are_the_mean_over_tokens_not_over_rows():
    task = tasks.create("next-token", about(Array("int64", (3,)), Array("int64", (3,), 2), classes=2))
    logits = torch.tensor([[[2.0, 0.0]] * 3, [[0.0, 1.0]] * 3], dtype=torch.float64)
    targets = torch.tensor([[0, 0, 0], [0, -1, -1]])
    found = tasks.client_loss(task)(logits[None], targets[None], torch.full((1, 2), 0.5).double())
    right, wrong = torch.nn.functional.cross_entropy(torch.stack([logits[0, 0], logits[1, 0]]), torch.tensor([0, 0]),
                                                     reduction="none")  # fmt: skip
    assert float(found) == pytest.approx(float(3 * right + wrong) / 4, abs=1e-15)


def test_counts_may_be_weights_below_one():
    weighted = lambda outputs, targets: ((outputs[:, 0] - targets) ** 2 * 0.01, torch.full_like(targets, 0.01))  # noqa: E731
    task = tasks.own.of_functions(tasks.Task, weighted, None, None)(about(Array("float32")))
    outputs, targets = torch.tensor([[1.0], [3.0]]).double(), torch.zeros(2).double()
    found = tasks.client_loss(task)(outputs[None], targets[None], torch.full((1, 2), 0.5).double())
    assert float(found) == pytest.approx(5.0, abs=1e-14)
    assert tasks.client_loss(task)(outputs[None], targets[None], torch.zeros(1, 2).double()).item() == 0


def test_a_rank_without_examples_has_no_counts():
    loss = tasks.client_loss(tasks.create("regression", about(Array("float32"))))
    assert loss.counts(torch.zeros(0), (1,)) is None
    assert loss.counts(torch.zeros(3), (1,)) is None
