"""Tasks of a user's own: a class by name, or functions from Python; and what of a task is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..support.errors import UserError, shortened
from ..support.user_code import load_object, users_code
from .base import Metric, Task

EXPECTED = "package.module:Class or path/file.py:Class, a subclass of fedlada_mpi.Task"


def load(name: str) -> type[Task]:
    """The class that ``--task`` names."""
    found = load_object("--task", name, EXPECTED)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise UserError(
            f"--task {name}: got {shortened(found)}, expected a subclass of fedlada_mpi.Task; a loss and metrics from "
            "Python are given there again"
        )
    return found


def of_functions(
    base: type[Task],
    loss: Callable[..., Any] | None,
    metrics: Mapping[str, Metric | Callable[..., Any]] | None,
    objective: str | None,
) -> type[Task]:
    """A task like ``base`` with this loss, these metrics and this objective, as far as they are given.

    Its name is that of the first function.
    """
    functions = tuple(getattr(each, "function", each) for each in (loss, *(metrics or {}).values()) if each is not None)
    members: dict[str, Any] = {"functions": functions, "name": ""}
    if loss is not None:
        members["loss"] = lambda self, outputs, targets: loss(outputs, targets)
        members |= {"batch_loss": None, "losses": {}}
    if metrics is not None:
        members["metrics"] = dict(metrics)
        if objective is None and base.objective.removeprefix("-") not in ("loss", *metrics):
            raise UserError(f"objective: got none, expected one of {_choices(metrics)}")
    if objective is not None:
        members["objective"] = objective
    elif loss is not None and metrics is None and base is Task:
        members["objective"] = "-loss"
    first: Any = functions[0] if functions else base
    named: Any = first if hasattr(first, "__qualname__") else type(first)
    members |= {"__module__": named.__module__, "__qualname__": named.__qualname__}
    return type(named.__name__, (base,), members)


def objective_of(task: Task, asked: str = "") -> tuple[str, bool]:
    """The name of the metric that decides, and whether more of it is better."""
    objective = asked or task.objective
    name = objective.removeprefix("-")
    if name not in ("loss", *task.metrics):
        raise UserError(f"--objective: got {shortened(objective)}, expected one of {_choices(task.metrics)}")
    if objective == "loss":
        raise UserError("--objective: got loss, of which less is better: expected -loss")
    more = not objective.startswith("-")
    known = getattr(task.metrics.get(name), "larger_is_better", None)
    if known is not None and known != more:
        better, right = ("more", name) if known else ("less", f"-{name}")
        raise UserError(f"--objective: got {objective}, of which {better} is better: expected {right}")
    return name, more


def check(name: str, task: Task) -> None:
    """Refuse attributes that are not those of a task."""
    what = f"--task {name}"
    if not hasattr(task, "about"):
        raise UserError(f"{what}: it has no about, expected super().__init__(about, loss) in its __init__")
    if not isinstance(task.metrics, Mapping):
        raise UserError(f"{what}: metrics: got {shortened(task.metrics)}, expected functions by name")
    if not isinstance(task.objective, str):
        raise UserError(f"{what}: objective: got {shortened(task.objective)}, expected the name of a metric, or -NAME")
    shape: object = task.outputs()
    if shape is not None and not (
        isinstance(shape, tuple) and shape and all(isinstance(size, int) and size > 0 for size in shape)
    ):
        raise UserError(f"{what}: outputs(): got {shortened(shape)}, expected a shape such as (1,), or None")


def check_targets(task: Task, targets: np.ndarray, where: str) -> None:
    """Refuse targets that the task refuses."""
    with users_code(f"--task {type(task).__name__}", "check_targets(targets, where) that raises fedlada_mpi.UserError"):
        task.check_targets(targets, where)


def check_metrics(task: Task) -> None:
    """Names that are columns, and functions behind them."""
    for name, metric in task.metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("loss", "count"):
            raise UserError(f"metrics: got the name {shortened(name)}, expected a word, other than loss and count")
        if not callable(getattr(metric, "function", metric)):
            raise UserError(f"metrics: got {shortened(metric)} for {name}, expected a function of (outputs, targets)")


def _choices(metrics: Mapping[str, Any]) -> str:
    return ", ".join([*metrics, *(f"-{name}" for name in metrics), "-loss"]) + ' ("-": the smaller, the better)'
