"""Reading run directories, finished or in progress."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import algorithms
from .. import config as settings
from ..errors import UserError
from ..processes import process_map, usable_cores
from ..rundir.metrics import PHASES

SCALARS = (
    *("lr", "local_loss", "train_loss", "train_acc", "test_loss", "test_acc", "consistency"),
    *("bytes_down", "bytes_up", "bytes_mpi", "paper_units"),
)
WORTH_A_PROCESS = 20_000_000  # bytes of metrics; fewer are read before another process has started


@dataclass
class Run:
    """One run: its settings and, for each round done, the value of every metric (NaN where there is none)."""

    path: Path
    settings: dict[str, Any]
    rounds: np.ndarray
    series: dict[str, np.ndarray]
    by_rank: dict[str, np.ndarray] = field(default_factory=dict)
    status: str = "unfinished"
    seconds: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def done(self) -> int:
        return int(self.rounds[-1]) if self.rounds.size else 0

    @property
    def complete(self) -> bool:
        """Whether no more rounds are to come."""
        return self.status == "finished" or self.done >= self.settings["rounds"]


def find(paths: Iterable[str | os.PathLike]) -> list[Path]:
    """The run directories at or under the paths, in order, each once."""
    directories: dict[Path, None] = {}
    for start in map(Path, paths):
        if not start.is_dir():
            raise UserError(f"there is no directory {start}: give run directories, or directories that contain them")
        for directory, below, files in os.walk(start):
            below.sort()
            if "config.json" in files:
                directories[Path(directory)] = None
                below.clear()
    if not directories:
        where = ", ".join(map(str, paths))
        raise UserError(f"no runs under {where} (looked for config.json): start one with python -m fedlada_mpi.run")
    return list(directories)


def read_all(paths: Iterable[str | os.PathLike]) -> tuple[list[Run], list[str]]:
    """All runs at or under the paths, and a message for each directory that could not be read."""
    directories = find(paths)
    workers = min(usable_cores(), _metrics_bytes(directories) // WORTH_A_PROCESS)
    results = list(process_map(_read_or_explain, directories, workers))
    runs = [result for result in results if isinstance(result, Run)]
    problems = [result for result in results if isinstance(result, str)]
    if not runs:
        raise UserError(problems[0])
    return runs, problems


def _metrics_bytes(directories: Iterable[Path]) -> int:
    files = (directory / "metrics.jsonl" for directory in directories)
    return sum(file.stat().st_size for file in files if file.is_file())


def _read_or_explain(directory: Path) -> Run | str:
    try:
        return read(directory)
    except UserError as error:
        return str(error)


def read(directory: Path) -> Run:
    """One run; what it has not written yet is empty."""
    try:
        given = json.loads((directory / "config.json").read_text())
        values = {**settings.Config().record(), **{k: v for k, v in given.items() if k in settings.SETTINGS}}
        values |= algorithms.recorded_hypers(str(values["algorithm"]), given)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{directory / 'config.json'} cannot be read as settings: {error}") from None
    try:
        records, skipped = parse((directory / "metrics.jsonl").read_bytes())
    except OSError:
        records, skipped = [], 0
    run = Run(directory, values, *_columns(records), by_rank=_by_rank(records), skipped=skipped)
    try:
        summary = json.loads((directory / "summary.json").read_text())
        run.status = str(summary.get("status", run.status))
        run.seconds = summary.get("seconds")
        run.environment = summary.get("environment") or {}
    except (OSError, ValueError, AttributeError):
        pass
    return run


def parse(text: bytes) -> tuple[list[dict[str, Any]], int]:
    """The records of a metrics file by round, and how many lines could not be read.

    The line being written is left out; of a round repeated after a restart the last record counts.
    """
    end = text.rfind(b"\n")
    lines = text[:end].split(b"\n") if end > 0 else []
    try:
        records = json.loads(b"[" + b",".join(lines) + b"]")
        skipped = 0
    except ValueError:
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
        skipped = len(lines) - len(records)
    good = [r for r in records if isinstance(r, dict) and isinstance(r.get("round"), int)]
    skipped += len(records) - len(good)
    by_round = {r["round"]: r for r in good}
    return [by_round[t] for t in sorted(by_round)], skipped


def _columns(records: Sequence[dict[str, Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The rounds, and every metric as an array over them."""
    rounds = np.array([r["round"] for r in records], dtype=np.int64)
    series = {name: np.array([r.get(name) for r in records], dtype=np.float64) for name in SCALARS}
    seconds = [r.get("seconds") or {} for r in records]
    for phase in (*PHASES, "total"):
        series[f"seconds_{phase}"] = np.array([s.get(phase) for s in seconds], dtype=np.float64)
    series["participants"] = np.array([len(r.get("participants") or ()) for r in records], dtype=np.float64)
    return rounds, series


def _by_rank(records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Mean seconds per round of each rank, over the rounds with the latest number of ranks."""
    means = {}
    for name in ("train", "wait"):
        per_round: list[list[float]] = [(r.get("seconds_by_rank") or {}).get(name) or [] for r in records]
        rows = [row for row in per_round if row]
        if rows:
            means[name] = np.mean([row for row in rows if len(row) == len(rows[-1])], axis=0)
    return means
