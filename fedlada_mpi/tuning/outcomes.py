"""What came of a run of a search: the objective after some round, or why there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..experiments import PlannedRun
from ..experiments.progress import columns_of
from ..rundir import metrics
from ..rundir.columns import Metric
from ..rundir.files import checkpoint_round, complete_checkpoints, to_json, write_atomically
from ..rundir.results import finished_rounds
from ..support import disk
from ..support.errors import DIVERGED, UserError
from ..support.inputs import read_json

FAILURE = "failure.json"  # in the directory of a run that did not get to its last round
SCORED, UNDEFINED, DID_DIVERGE, FAILED = "scored", "undefined", "diverged", "failed"


@dataclass(frozen=True)
class Outcome:
    """The score of a run, NaN where it has none."""

    score: float
    state: str = SCORED

    @property
    def known(self) -> bool:
        return not math.isnan(self.score)

    def record(self) -> dict[str, Any]:
        return {"score": self.score, "state": self.state}


def of_record(record: Any) -> Outcome:
    """From what ``Outcome.record`` gave; raises ValueError, TypeError or KeyError."""
    score, state = record["score"], record["state"]
    if state not in (SCORED, UNDEFINED, DID_DIVERGE, FAILED) or (state == SCORED) != isinstance(score, (int, float)):
        raise ValueError
    return Outcome(math.nan if score is None else float(score), state)


def of(run: PlannedRun, part: str, mean_of: int = 1) -> Outcome | None:
    """That of a run up to its last round, None as long as it is not known: the mean objective of the last evaluations
    on a part of the data.

    A round counts once there are results or a checkpoint of it or a later one: from there on it is not repeated.
    """
    if max(finished_rounds(run.directory) or 0, _checkpoint(run.directory)) >= run.rounds:
        if changed := run.changed():
            raise UserError(
                f"{run.directory}: made with other code or defaults, changed since: {', '.join(changed)}; "
                "--accept-changed-code keeps it, another --out begins a new search"
            )
        return _recorded(run, part, mean_of)
    return _failure(run)


def _checkpoint(directory: Path) -> int:
    known = complete_checkpoints(directory)
    return checkpoint_round(known[-1]) if known else 0


def _recorded(run: PlannedRun, part: str, mean_of: int) -> Outcome:
    columns = columns_of(run.directory)
    column = columns.objective.of(part)
    try:
        records, _ = metrics.parse(metrics.read(run.directory), columns)
    except OSError as error:
        raise UserError(f"{run.directory / metrics.METRICS} cannot be read: {error.strerror or error}") from None
    at = {record["round"]: record for record in records if record["round"] <= run.rounds}
    if run.rounds not in at or column not in at[run.rounds]:
        raise UserError(
            f"{run.directory / metrics.METRICS} has no {column} of round {run.rounds}: remove the directory, and give "
            "the same command again"
        )
    last = at.pop(run.rounds)[column]
    # Of a round without evaluation, too, the column is null.
    earlier = [value for record in at.values() if (value := record.get(column)) is not None]
    values = [*earlier, last][-mean_of:]
    if any(value is None or not math.isfinite(value) for value in values):
        return Outcome(math.nan, UNDEFINED)
    return Outcome(math.fsum(values) / len(values))


def _failure(run: PlannedRun) -> Outcome | None:
    try:
        record = read_json(run.directory / FAILURE)
        rounds, status = int(record["rounds"]), int(record["status"])
    except (OSError, ValueError, TypeError, LookupError):
        return None
    if rounds != run.rounds:
        return None
    return Outcome(math.nan, DID_DIVERGE if status == DIVERGED else FAILED)


def write_failure(run: PlannedRun, status: int) -> None:
    """Keep that a run has ended with this status, and is not started again."""
    with disk.writing(run.directory / FAILURE):
        run.directory.mkdir(parents=True, exist_ok=True)
    write_atomically(run.directory / FAILURE, to_json({"rounds": run.rounds, "status": status}) + "\n")


def forget_failure(directory: Path) -> None:
    """Let the run start again; its directory may be gone."""
    with disk.writing(directory / FAILURE):
        (directory / FAILURE).unlink(missing_ok=True)


def objective_of(run: PlannedRun) -> Metric:
    """The objective of a run that has begun."""
    return columns_of(run.directory).objective
