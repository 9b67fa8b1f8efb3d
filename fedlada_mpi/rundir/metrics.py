"""What a run records: metrics.jsonl, phase times, the summary, TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import disk
from .files import to_json, write_atomically

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PHASES = ("bcast", "train", "reduce", "server", "eval")
ALL_PHASES = (*PHASES, "total")  # the time of a whole round, also between the phases
TOTALS = ("bytes_down", "bytes_up", "bytes_mpi", "paper_units")  # of a round in the metrics, of all in the summary
EVALUATED = ("train_loss", "train_acc", "test_loss", "test_acc")


class Clock:
    """Seconds by phase, for one round at a time; ``total`` is all the time since the last one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(ALL_PHASES, 0.0)
        self.since = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def take(self) -> list[float]:
        """The phases' seconds so far; starts again from zero."""
        now = time.perf_counter()
        self.seconds["total"], self.since = now - self.since, now
        taken = [self.seconds[phase] for phase in ALL_PHASES]
        self.seconds = dict.fromkeys(ALL_PHASES, 0.0)
        return taken


def read(path: Path, until: int | None = None) -> list[dict[str, Any]]:
    """The rounds recorded so far, up to round ``until``; a half-written last line is left out."""
    records = []
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        for line in file:
            if not line.endswith("\n"):
                break
            record = json.loads(line)
            if until is not None and record["round"] > until:
                break
            records.append(record)
    return records


class Recorder:
    """Appends one JSON object per round, and TensorBoard events if that is installed."""

    def __init__(self, out: Path, resumed_at: int):
        self.path = out / "metrics.jsonl"
        self.records = read(self.path, resumed_at) if resumed_at else []
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in self.records))
        with disk.writing(self.path):
            self.file = open(self.path, "a")  # noqa: SIM115 (open for the whole run)
        self.events: SummaryWriter | None = None
        self.folder = out / "tensorboard"
        with contextlib.suppress(ImportError), disk.writing(self.folder):
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(self.folder), purge_step=resumed_at + 1)

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        with disk.writing(self.path):
            self.file.write(to_json(record) + "\n")
            self.file.flush()
        if self.events is not None:
            with disk.writing(self.folder):
                for name in ("local_loss", "consistency", "lr", *EVALUATED):
                    if record.get(name) is not None:
                        self.events.add_scalar(name, record[name], record["round"])

    def sync(self) -> None:
        """Flush to disk, before a checkpoint declares these rounds done."""
        with disk.writing(self.path):
            os.fsync(self.file.fileno())

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the files; an exception that is on its way goes on, whatever else fails here."""
        with contextlib.suppress(*(() if kind is None else (disk.WriteError,))):
            with disk.writing(self.path):
                self.file.close()
            if self.events is not None:
                with disk.writing(self.folder):
                    self.events.close()


def summarise(records: list[dict[str, Any]], targets: list[float]) -> dict[str, Any]:
    """Best and final results, the first round at each target accuracy (null: not reached), and what was spent."""
    evaluated = [r for r in records if r.get("test_acc") is not None]
    best = max(evaluated, key=lambda r: r["test_acc"], default=None)
    return {
        "rounds": records[-1]["round"] if records else 0,
        "final": {name: evaluated[-1][name] for name in ("round", *EVALUATED)} if evaluated else None,
        "best": {"round": best["round"], "test_acc": best["test_acc"]} if best else None,
        "targets": {f"{t:g}": next((r["round"] for r in evaluated if r["test_acc"] >= t), None) for t in targets},
        **{name: sum(r[name] for r in records) for name in TOTALS},
        "seconds": sum(r["seconds"]["total"] for r in records),
    }
