"""Reading run directories, finished or going on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import config as settings
from ..errors import UserError
from ..processes import process_map, usable_cores
from ..rundir.metrics import PHASES

SCALARS = (
    *("lr", "local_loss", "train_loss", "train_acc", "test_loss", "test_acc", "consistency"),
    *("bytes_down", "bytes_up", "bytes_mpi", "paper_units"),
)
# With fewer bytes of metrics than this, reading takes less time than starting processes.
WORTH_PROCESSES = 50e6


@dataclass
class Run:
    """One run: its settings and, per round it has done, one number of everything (NaN where there is none)."""

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
        """Whether nothing more is to come."""
        return self.status == "finished" or self.done >= self.settings["rounds"]


def find(paths: Iterable[str | os.PathLike]) -> list[Path]:
    """The run directories at or under the paths, in order, each once."""
    found: dict[Path, None] = {}
    for start in map(Path, paths):
        if not start.is_dir():
            raise UserError(f"there is no directory {start}: give run directories, or directories that hold them")
        for directory, below, files in os.walk(start):
            below.sort()
            if "config.json" in files:
                found[Path(directory)] = None
                below.clear()
    if not found:
        where = ", ".join(map(str, paths))
        raise UserError(f"no runs under {where} (looked for config.json): start one with python -m fedlada_mpi.run")
    return list(found)


def read_all(paths: Iterable[str | os.PathLike]) -> tuple[list[Run], list[str]]:
    """All runs at or under the paths, and in words the directories that could not be read."""

    def attempt(directory: Path) -> Run | str:
        try:
            return read(directory)
        except UserError as error:
            return str(error)

    directories = find(paths)
    found = list(process_map(attempt, directories, usable_cores() if _bytes(directories) > WORTH_PROCESSES else 1))
    runs = [one for one in found if isinstance(one, Run)]
    problems = [one for one in found if isinstance(one, str)]
    if not runs:
        raise UserError(problems[0])
    return runs, problems


def _bytes(directories: Iterable[Path]) -> int:
    files = (directory / "metrics.jsonl" for directory in directories)
    return sum(file.stat().st_size for file in files if file.is_file())


def read(directory: Path) -> Run:
    try:
        given = json.loads((directory / "config.json").read_text())
        values = {**asdict(settings.Config()), **{k: v for k, v in given.items() if k in settings.FIELDS}}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{directory / 'config.json'} is not readable as settings: {error}") from None
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


def parse(text: bytes) -> tuple[list[dict], int]:
    """The records of a metrics file by round, and how many lines could not be read.

    The line being written is left out; of a round done again after a restart the last record counts.
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


def _columns(records: Sequence[dict]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rounds = np.array([r["round"] for r in records], dtype=np.int64)
    series = {name: np.array([r.get(name) for r in records], dtype=np.float64) for name in SCALARS}
    seconds = [r.get("seconds") or {} for r in records]
    for phase in (*PHASES, "total"):
        series[f"seconds_{phase}"] = np.array([s.get(phase) for s in seconds], dtype=np.float64)
    series["participants"] = np.array([len(r.get("participants") or ()) for r in records], dtype=np.float64)
    return rounds, series


def _by_rank(records: Sequence[dict]) -> dict[str, np.ndarray]:
    """Mean seconds a round of each rank, over the rounds with the latest number of ranks."""
    found = {}
    for name in ("train", "wait"):
        rows = [(r.get("seconds_by_rank") or {}).get(name) for r in records]
        rows = [row for row in rows if row]
        if rows:
            found[name] = np.mean([row for row in rows if len(row) == len(rows[-1])], axis=0)
    return found
