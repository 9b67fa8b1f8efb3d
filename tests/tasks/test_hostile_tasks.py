"""Tasks and augmentations of a user's own that cannot be right: refused in one line, before anything is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlada_mpi.models.form import Form
from fedlada_mpi.rounds.augmentation import Augmentation
from fedlada_mpi.session.console import closing_lines
from fedlada_mpi.support.errors import UserError
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks import About, Array, Task, check_targets, create
from fedlada_mpi.tasks.dry_run import dry_run

ABOUT = About(Array("float32", (3,)), Array("float32"))
OUTPUTS, TARGETS = torch.tensor([[0.5], [1.0], [-2.0], [0.1]]), torch.tensor([1.0, 0.0, 3.0, 2.0])


def squared(outputs, targets):
    return (outputs[:, 0] - targets) ** 2


class Squared(Task):
    def loss(self, outputs, targets):
        return squared(outputs, targets)


class Text(Squared):
    metrics = "rmse"


class Nothing(Squared):
    objective = None


class Alone(Squared):
    def __init__(self, about, loss=""):
        pass


class Number(Squared):
    def outputs(self):
        return 1


class Empty(Squared):
    def outputs(self):
        return (0,)


class Failing(Squared):
    def outputs(self):
        raise KeyError("bins")

    def check_targets(self, targets, where):
        raise KeyError("events")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Text, "metrics: got 'rmse', expected functions by name"),
        (Nothing, "objective: got None"),
        (Alone, r"expected super\(\).__init__\(about, loss\)"),
        (Number, r"outputs\(\): got 1, expected a shape such as \(1,\)"),
        (Empty, r"outputs\(\): got \(0,\)"),
        (Failing, "KeyError: 'bins'"),
    ],
)
def test_classes_that_are_no_tasks(kind, words):
    with pytest.raises(UserError, match=words):
        create(Given(kind), ABOUT)


def test_one_column_of_targets_is_no_set_of_labels():
    task = create("multilabel", About(Array("float32", (2,)), Array("int64")))
    with pytest.raises(UserError, match=r"int64 of shape \[3\], expected 0 or 1 for every label, \[n, labels\]"):
        check_targets(task, np.array([0, 1, 1]), "data")


def test_targets_that_a_task_fails_on():
    with pytest.raises(UserError, match="--task Failing: KeyError: 'events'"):
        check_targets(Failing(ABOUT), np.zeros(3), "data")


class Padded(Task):
    def batch_loss(self, outputs, targets, present):
        return squared(outputs, targets).mean()


class Present(Task):
    def batch_loss(self, outputs, targets, present):
        return (squared(outputs, targets) * present).sum() / present.sum()


class Broadcast(Task):
    def loss(self, outputs, targets):
        return (outputs - targets) ** 2


class Negative(Task):
    def loss(self, outputs, targets):
        return squared(outputs, targets), -torch.ones(len(targets))


class ByOutputs(Task):
    def loss(self, outputs, targets):
        return squared(outputs, targets), 1 + outputs[:, 0].abs()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Padded, "batch_loss counts padding"),
        (Broadcast, r"its loss of outputs \[4, 1\] and targets \[4\] is \[4, 4\]: make their shapes equal first"),
        (Negative, r"got counts \[-1.0, .* from its loss, expected 0 or more"),
        (ByOutputs, "the counts of its loss depend on the outputs"),
    ],
)
def test_losses_that_would_be_wrong(kind, words):
    with pytest.raises(UserError, match=words):
        dry_run("mine", kind(ABOUT), OUTPUTS, TARGETS)


class MixedMetric(Squared):
    metrics = {"mae": lambda outputs, targets: (outputs - targets).abs().mean(1)}


class BySize(Squared):
    metrics = {"share": lambda outputs, targets: (squared(outputs, targets), torch.full_like(targets, len(targets)))}


@pytest.mark.parametrize(("kind", "column"), [(MixedMetric, "mae"), (BySize, "share.1")])
def test_metrics_that_depend_on_the_batch(kind, column):
    with pytest.raises(UserError, match=f"{column} of an example depends on the others of its batch: make the shapes"):
        dry_run("mine", kind(ABOUT), OUTPUTS, TARGETS)


class Undefined(Squared):
    metrics = {"never": lambda outputs, targets: targets * torch.nan, "most": lambda outputs, targets: targets / 0}


def test_metrics_may_be_undefined():
    dry_run("mine", Undefined(ABOUT), OUTPUTS, TARGETS)


def test_a_loss_of_a_batch_that_leaves_padding_out():
    dry_run("mine", Present(ABOUT), OUTPUTS, TARGETS)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda batch: {name: value * float("nan") for name, value in batch.items()}, "numbers that are not finite"),
        (lambda batch: batch["a"], "got a tensor, expected a, b, as it was given"),
        (lambda batch: {"a": batch["a"]}, "got a, expected a, b"),
    ],
)
def test_augmentations_of_several_inputs(function, words):
    form = Form({"a": Array("float32", (2,)), "b": Array("float32", (2,))})
    with pytest.raises(UserError, match=words):
        Augmentation(Given(function), form)


def test_a_run_whose_objective_was_never_defined_ends_as_others():
    nan = float("nan")
    summary = {"status": "finished", "rounds": 2, "seconds": 1.0, "targets": {}, "best": None}
    summary["final"] = {"test_acc": nan, "train_acc": None, "test_loss": nan, "train_loss": None}
    assert "final" in closing_lines(summary, [], "out").splitlines()[1]
