"""What a run can learn; ``base.py`` has the interface, ``TASKS`` what is built in."""

from __future__ import annotations

from ..support.errors import UserError
from ..support.suggestions import did_you_mean
from .base import About, Array, Metric, Task, summed, whole
from .classification import Classification
from .multilabel import Multilabel
from .next_token import NextToken
from .regression import Regression
from .segmentation import Segmentation
from .survival import Survival

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Classification, Multilabel, Regression, Segmentation, NextToken, Survival)
}


def create(name: str, about: About, loss: str = "") -> Task:
    """The built-in task ``name`` for data as ``about`` describes it, with one of its losses, or its first."""
    if name not in TASKS:
        raise UserError(f"--task: got {name!r}, expected one of {', '.join(TASKS)}{did_you_mean(name, TASKS)}")
    task = TASKS[name]
    if loss and loss not in task.losses:
        known = ", ".join(task.losses)
        raise UserError(
            f"--loss: got {loss!r} for task {name}, expected one of {known}{did_you_mean(loss, task.losses)}"
        )
    return task(about, loss)


__all__ = ["TASKS", "About", "Array", "Metric", "Task", "create", "summed", "whole"]
