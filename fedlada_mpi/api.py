"""``fedlada_mpi.train``: a run from Python, alone or on every rank of a world."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .algorithms import Algorithm, find
from .session.launch import Launched, launched
from .session.plan import Request
from .support import signals
from .support.errors import CallbackError, DivergedError, UserError, shortened
from .support.user_code import Given

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .data.arrays import Data
    from .rounds.callback import OnRound
    from .tasks import Metric, Task
    from .trained import Run


def train(
    *,
    algorithm: str | type[Algorithm] | None = None,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    data: Data | None = None,
    augment: str | Callable[[Any], Any] | None = None,
    task: str | type[Task] | None = None,
    loss: str | Callable[[Tensor, Tensor], Any] | None = None,
    metrics: str | Mapping[str, Metric | Callable[..., Any]] | None = None,
    objective: str | None = None,
    config: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_round: OnRound | None = None,
    quiet: bool = False,
    accept_changed_code: bool = False,
    trust: bool = False,
    **settings: Any,
) -> Run:
    """Train as ``python -m fedlada_mpi.run`` does, with the same results to the bit.

    Every setting of the command is a keyword: ``train(dataset="digits", algorithm="fedlada", rounds=20, lr=0.1)``.
    Further ones, and what may be given in place of a name:

    ``algorithm``: also a class that inherits from ``fedlada_mpi.Algorithm``.
    ``model``: also a function of ``(outputs, shape)`` that returns a module, for images of ``(classes, image_shape)``;
    or a module. The run trains a copy of the module, which starts from its values.
    ``data``: a ``fedlada_mpi.Data``, instead of ``dataset``.
    ``augment``: also a function of a batch, as the model gets it, that gives a batch; its draws are seeded.
    ``task``: also a class that inherits from ``fedlada_mpi.Task``.
    ``loss``: also a function of ``(outputs, targets)`` that gives the loss of each example.
    ``metrics``: also functions of ``(outputs, targets)`` by name, see ``fedlada_mpi.Metric``, ``whole`` and ``summed``.
    ``objective``: the metric that decides which round is the best, "-NAME" where less is better.
    ``config``: a TOML file with settings, or the ``config.json`` of a run.
    ``resume``, ``overwrite``: go on with the run in ``out``, or discard it.
    ``on_round``: called after every round, on rank 0, with what the round adds to ``metrics.jsonl``; where it returns
    ``False``, the run stops with a checkpoint. What it raises ends the run on all ranks.
    ``quiet``: print nothing.
    ``accept_changed_code``: with ``resume``, go on although the code of the method or the model has changed.
    ``trust``: run code that only the ``config.json`` of a run names and that this user has not run here before.

    On several ranks, each must call ``train`` with the same arguments; each gets the same ``Run``. Raises ``UserError``
    for what a user can fix and ``DivergedError`` for a training that left the finite numbers, both on every rank.
    """
    if resume and overwrite:
        raise UserError("resume and overwrite contradict each other: give one of them")
    if on_round is not None and not callable(on_round):
        raise UserError(f"on_round: got {shortened(on_round)}, expected a function of a round's record")
    if config is not None and not isinstance(config, (str, os.PathLike)):
        raise UserError(f"config: got {shortened(config)}, expected the path of a file with settings")
    own = {"algorithm": _method(algorithm), "model": _model(model), **_task(task, loss, metrics, objective, data)}
    own["augment"] = Given(augment) if callable(augment) else augment
    given = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    given |= {name: value for name, value in own.items() if value is not None}
    request = Request(given, config, resume, overwrite, data, on_round, quiet, accept_changed_code, trust)
    with signals.handled():
        try:
            with launched(request) as ended:
                return _run(ended)
        except CallbackError as error:
            # The exception itself is on the root only.
            raise error.__cause__ or UserError(str(error)) from None
        except (UserError, DivergedError) as error:
            kind = DivergedError if isinstance(error, DivergedError) else UserError
            raise kind(_in_python(str(error))) from error.__cause__


def _method(algorithm: str | type[Algorithm] | None) -> str | None:
    if algorithm is None or isinstance(algorithm, str):
        return algorithm
    if not isinstance(algorithm, type) or not issubclass(algorithm, Algorithm):
        raise UserError(
            f"algorithm: got {shortened(algorithm)}, expected a name or a subclass of fedlada_mpi.Algorithm"
        )
    built_in = bool(algorithm.name) and algorithm.__module__.startswith("fedlada_mpi.")
    return algorithm.name if built_in and find(algorithm.name) is algorithm else Given(algorithm)


def _model(model: object) -> str | None:
    if model is None or isinstance(model, str):
        return model
    if not callable(model):
        raise UserError(f"model: got {shortened(model)}, expected a name, a module, or a function that returns one")
    return Given(model)


def _task(
    task: object, loss: object, metrics: object, objective: object, data: Data | None = None
) -> dict[str, str | None]:
    """The settings of what is learned; a loss or metrics of one's own make a task of one's own."""
    from .tasks.base import Task
    from .tasks.own import of_functions

    if objective is not None and not isinstance(objective, str):
        raise UserError(f"objective: got {shortened(objective)}, expected the name of a metric, or -NAME")
    if loss is not None and not isinstance(loss, str) and not callable(loss):
        raise UserError(f"loss: got {shortened(loss)}, expected a name, or a function of (outputs, targets)")
    if metrics is not None and not isinstance(metrics, (str, Mapping)):
        raise UserError(f"metrics: got {shortened(metrics)}, expected names, or functions by name")
    if task is not None and not isinstance(task, str) and not (isinstance(task, type) and issubclass(task, Task)):
        raise UserError(f"task: got {shortened(task)}, expected a name or a subclass of fedlada_mpi.Task")
    named = {"loss": loss if isinstance(loss, str) else None, "metrics": metrics if isinstance(metrics, str) else None}
    if callable(loss) or isinstance(metrics, Mapping):
        from .tasks import find

        if task is None and not callable(loss):  # metrics next to the loss of a task
            task = getattr(getattr(data, "examples", None), "task", "classification" if data else "")
            if not task:
                raise UserError("metrics: got functions alone, expected also task= or loss=")
        base: Any = find(task) if isinstance(task, str) else task or Task
        functions = metrics if isinstance(metrics, Mapping) else None
        own = of_functions(base, loss if callable(loss) else None, functions, objective)
        return {"task": Given(own), **named, "objective": objective}
    return {"task": Given(task) if isinstance(task, type) else task, **named, "objective": objective}


def _in_python(message: str) -> str:
    """A message that names the command's options, with keywords in their place; commands in it stay as they are."""
    if "python -m " in message:
        return message
    alone = {name: f"{name.replace('-', '_')}=True" for name in ("resume", "overwrite", "accept-changed-code", "trust")}
    return re.sub(r"(?<![\w-])--([a-z][a-z-]*)", lambda m: alone.get(m[1], m[1].replace("-", "_")), message)


def _run(ended: Launched) -> Run:
    """What every rank returns: the root's results, and the model that the rank holds itself."""
    from .trained import Run, load, of_session

    config, session, world = ended.config, ended.session, ended.world
    own = config.model if isinstance(config.model, Given) else None

    def results() -> dict[str, Any]:
        run = load(config.out)
        metrics = {name: values.tolist() for name, values in run.metrics.items()}
        return {"config": run.config, "summary": run.summary, "metrics": metrics}

    found = world.broadcast_json(world.on_root(results))
    trained = own if session is None else of_session(session)
    # Who trains a model has named its code, or agreed to it.
    agreed = {"trust": True, "accept_changed_code": True}
    task = config.task if isinstance(config.task, Given) else None
    return Run(Path(config.out), found["config"], found["summary"], found["metrics"], trained, **agreed, task=task)
