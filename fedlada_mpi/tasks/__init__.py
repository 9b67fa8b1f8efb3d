"""What a run can learn; ``base.py`` has the interface, ``TASKS`` what is built in."""

from __future__ import annotations

from contextlib import nullcontext

from .. import settings
from ..support.errors import UserError, shortened
from ..support.suggestions import did_you_mean
from ..support.user_code import users_code
from . import own
from .base import About, Array, Metric, Task, is_built_in, summed, whole
from .classification import Classification
from .client_loss import CROSS_ENTROPY, ClientLoss
from .multilabel import Multilabel
from .next_token import NextToken
from .own import check_targets
from .regression import Regression
from .scores import ClassScores, Scores
from .segmentation import Segmentation
from .survival import Survival

_BUILT_IN: tuple[type[Task], ...] = (Classification, Multilabel, Regression, Segmentation, NextToken, Survival)
TASKS = dict(zip(settings.TASKS, _BUILT_IN, strict=True))


def find(name: str) -> type[Task]:
    """The task that ``--task`` names: a built-in one, or a user's own as package.module:Class or file.py:Class."""
    if ":" in name:
        return own.load(name)
    if name not in TASKS:
        known = f"{', '.join(TASKS)}, package.module:Class or path/file.py:Class"
        raise UserError(f"--task: got {shortened(name)}, expected one of {known}{did_you_mean(name, TASKS)}")
    return TASKS[name]


def create(name: str, about: About, loss: str = "", metrics: str = "") -> Task:
    """The task ``name`` for data as ``about`` describes it, with one of its losses, or its first.

    ``metrics``: further ones that it has, separated by commas.
    """
    kind = find(name)
    if loss and loss not in kind.losses:
        known = f"expected one of {', '.join(kind.losses)}" if kind.losses else "which has its own: leave it out"
        raise UserError(f"--loss: got {shortened(loss)} for task {name}, {known}{did_you_mean(loss, kind.losses)}")
    with nullcontext() if is_built_in(kind) else users_code(f"--task {name}", "a subclass of fedlada_mpi.Task"):
        task = kind(about, loss)
        own.check(name, task)
    asked = [word.strip() for word in metrics.split(",") if word.strip()]
    for word in asked:
        if word not in (*task.metrics, *kind.optional):
            known = ", ".join(kind.optional) or "none"
            raise UserError(f"--metrics: got {shortened(word)}, and the further metrics of {name} are: {known}")
    if asked:
        task.metrics = {**task.metrics, **{word: kind.optional[word] for word in asked if word in kind.optional}}
    own.check_metrics(task)
    return task


def client_loss(task: Task) -> ClientLoss:
    """The loss of clients' batches; that of classification has compiled kernels."""
    return CROSS_ENTROPY if type(task) is Classification else ClientLoss(task)


def scores(task: Task, output_shape: tuple[int, ...]) -> Scores:
    """What is added up of every example."""
    plain = type(task) is Classification and task.metrics.keys() == Classification.metrics.keys()
    return ClassScores(*output_shape) if plain else Scores(task, output_shape)


__all__ = [
    "TASKS",
    "About",
    "Array",
    "ClientLoss",
    "Metric",
    "Scores",
    "Task",
    "check_targets",
    "client_loss",
    "create",
    "find",
    "scores",
    "summed",
    "whole",
]
