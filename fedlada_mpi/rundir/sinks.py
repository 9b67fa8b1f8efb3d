"""Where a run's metrics go besides metrics.jsonl: TensorBoard if it is installed, W&B and MLflow by flags.

    WANDB_MODE=offline python -m fedlada_mpi.run --wandb
    MLFLOW_TRACKING_URI=http://localhost:5000 python -m fedlada_mpi.run --mlflow

Project, experiment, server and login are the services' own settings (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, ...). Only
the root records. The training goes on without a service that fails during a run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..settings import Config
from ..support import disk
from ..support.errors import UserError, first_line
from ..support.inputs import read_json
from .files import to_json, write_atomically

IDS = "trackers.json"  # the run's id in each service, by which a resumed run continues there
_PROJECT = "fedlada_mpi"


class Sink(Protocol):
    """One place that metrics go to."""

    id: str  # of the run, empty if the place has none

    def add(self, number: int, values: Mapping[str, float]) -> None:
        """The metrics of round ``number``."""

    def flush(self) -> None:
        """Save what was added; called before a checkpoint."""

    def close(self, status: str) -> None:
        """End with a status: finished, stopped or failed."""


class TensorBoard:
    id = ""

    def __init__(self, out: Path, resumed_at: int):
        from torch.utils.tensorboard import SummaryWriter

        self.folder = out / "tensorboard"
        with disk.writing(self.folder):
            before = set(self.folder.glob("*"))
            self.events = SummaryWriter(str(self.folder), purge_step=resumed_at + 1)
            self.files = set(self.folder.glob("*")) - before

    def add(self, number: int, values: Mapping[str, float]) -> None:
        with disk.writing(self.folder):
            for name, value in values.items():
                self.events.add_scalar(name, value, number)

    def flush(self) -> None:
        pass

    def close(self, status: str) -> None:
        with disk.writing(self.folder):
            self.events.close()


class Wandb:
    """A run of Weights & Biases, next to others of this process; its files are in the folder wandb of the run."""

    _starting = threading.Lock()  # its hooks, and the run that is active, belong to the process

    def __init__(self, out: Path, settings: Mapping[str, Any], id: str):
        import wandb

        with self._starting:
            # W&B replaces these to learn the exit status, and never restores them; our excepthook ends all ranks.
            before = sys.exit, sys.excepthook
            try:
                self.run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", _PROJECT),
                    name=os.environ.get("WANDB_NAME", out.name),
                    id=id or None,
                    resume="allow",
                    reinit="create_new" if wandb.run else None,  # else it gives the one that is active
                    dir=str(out),
                    config=dict(settings),
                    settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
                )
            finally:
                sys.exit, sys.excepthook = before
        self.id = str(self.run.id)

    def add(self, number: int, values: Mapping[str, float]) -> None:
        # W&B already has the rounds that a resumed run repeats, and would print a warning for each.
        if number >= self.run.starting_step:
            self.run.log(dict(values), step=number)

    def flush(self) -> None:
        pass

    def close(self, status: str) -> None:
        self.run.finish(exit_code=int(status == "failed"))


class Mlflow:
    """A run of MLflow, recorded in batches, as every call may go over the network."""

    STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    SECONDS, METRICS, PARAMS, LENGTH = 5.0, 500, 100, 500  # between batches, in a batch of each, of a value

    def __init__(self, out: Path, settings: Mapping[str, Any], id: str):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.client, self.metric = MlflowClient(), Metric
        self.waiting: list[Any] = []
        self.since = time.monotonic()
        if id:
            self.client.update_run(id, status="RUNNING")
            self.id = id
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        run = os.environ.get("MLFLOW_RUN_NAME", out.name)
        self.id = str(self.client.create_run(experiment, run_name=run).info.run_id)
        params = [Param(name, str(value)[: self.LENGTH]) for name, value in settings.items()]
        for first in range(0, len(params), self.PARAMS):
            self.client.log_batch(self.id, params=params[first : first + self.PARAMS])

    def add(self, number: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self.waiting += [self.metric(name, value, now, number) for name, value in values.items()]
        if len(self.waiting) >= self.METRICS or time.monotonic() - self.since >= self.SECONDS:
            self.flush()

    def flush(self) -> None:
        waiting, self.waiting, self.since = self.waiting, [], time.monotonic()
        if waiting:
            self.client.log_batch(self.id, metrics=waiting)

    def close(self, status: str) -> None:
        self.flush()
        self.client.set_terminated(self.id, self.STATUS[status])


_SERVICES: dict[str, Callable[[Path, Mapping[str, Any], str], Sink]] = {"wandb": Wandb, "mlflow": Mlflow}


def _wanted(config: Config) -> list[str]:
    return [name for name in _SERVICES if getattr(config, name)]


def check_installed(config: Config) -> None:
    """Raise if a service is asked for that cannot be imported; called before anything is read or written."""
    for name in _wanted(config):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"--{name}: cannot import {name} ({first_line(error)}): pip install 'fedlada_mpi[{name}]', or leave "
                f"--{name} out"
            ) from None


class Sinks:
    """All places that the metrics of a run go to besides metrics.jsonl."""

    def __init__(self, config: Config, resumed_at: int):
        self.out, self.status, self.round = Path(config.out), "failed", resumed_at
        self.resumed_at = resumed_at
        self.sinks: dict[str, Sink] = {}
        self.ids = _read_ids(self.out) if resumed_at else {}
        for name in _wanted(config):
            try:
                self.sinks[name] = _SERVICES[name](self.out, config.record(), self.ids.get(name, ""))
            except Exception as error:  # whatever a service raises where it is not set up, or cannot be reached
                if not resumed_at:
                    self.__exit__()
                    raise UserError(
                        f"--{name}: cannot start ({first_line(error)}): set it up, or leave it out"
                    ) from None
                self._leave_out(name, error)

    def __enter__(self) -> Sinks:
        """Write the first files; the directory must be recognisable as that of a run by now."""
        with contextlib.suppress(ImportError):
            self.sinks["tensorboard"] = TensorBoard(self.out, self.resumed_at)
        self.ids |= {name: sink.id for name, sink in self.sinks.items() if sink.id}
        self._write_ids()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Close all; if that fails while an exception is raised, the exception goes on."""
        with contextlib.suppress(*(() if kind is None else (disk.WriteError,))):
            self._each(lambda sink: sink.close(self.status))

    def add(self, number: int, values: Mapping[str, float]) -> None:
        self.round = number
        self._each(lambda sink: sink.add(number, values))

    def flush(self) -> None:
        self._each(lambda sink: sink.flush())

    def is_missing(self) -> bool:
        """Whether files that were written are not there."""
        board = self.sinks.get("tensorboard")
        events = board.files if isinstance(board, TensorBoard) else set()
        return not all(path.exists() for path in events | ({self.out / IDS} if self.ids else set()))

    def put_back(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Write the files again; ``values``: of all rounds."""
        if "tensorboard" in self.sinks:
            with contextlib.suppress(disk.WriteError):
                self.sinks.pop("tensorboard").close("")
            self.sinks["tensorboard"] = board = TensorBoard(self.out, 0)
            for number, each in values.items():
                board.add(number, each)
        self._write_ids()

    def _write_ids(self) -> None:
        if self.ids:
            write_atomically(self.out / IDS, to_json(self.ids, indent=2) + "\n")

    def _each(self, action: Callable[[Sink], None]) -> None:
        for name, sink in [*self.sinks.items()]:
            try:
                action(sink)
            except disk.WriteError:
                raise
            except Exception as error:  # whatever a service raises when it, or the network, fails
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        self.sinks.pop(name, None)
        print(f"note: {name} failed after round {self.round} ({first_line(error)}): going on without it", flush=True)


def _read_ids(out: Path) -> dict[str, str]:
    """The run's id in each service; empty, for a new run there, if the file cannot be read."""
    try:
        ids = read_json(out / IDS)
    except (OSError, ValueError):
        return {}
    return {str(name): id for name, id in ids.items() if isinstance(id, str)} if isinstance(ids, dict) else {}
