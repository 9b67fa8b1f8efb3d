"""The results of a run: ``model.pt``, and ``summary.json``, which has the round of both."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..support import disk
from ..support.inputs import read_json
from .files import to_json, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

MODEL, BEST, SUMMARY = "model.pt", "best.pt", "summary.json"
DIVERGED = "diverged.json"  # of a run that left the finite numbers, until it goes on


def write(out: Path, model: Mapping[str, Tensor], summary: Mapping[str, Any]) -> None:
    """Replace the results; the old summary is removed first, so that it is never found with the new model."""
    with disk.writing(out / SUMMARY):
        (out / SUMMARY).unlink(missing_ok=True)
    write_model(out / MODEL, model)
    write_atomically(out / SUMMARY, to_json(summary, indent=2) + "\n")


def write_model(path: Path, model: Mapping[str, Tensor]) -> None:
    import torch  # here, because it is slow to import and readers of results do not need it

    content = io.BytesIO()  # torch crashes the process if it writes to a full disk itself
    torch.save(model, content)
    write_atomically(path, content.getvalue())


def mark_diverged(out: Path, rounds: int) -> None:
    """Keep that the round after so many was not finite; --resume goes on from the last checkpoint."""
    write_atomically(out / DIVERGED, to_json({"rounds": rounds}) + "\n")


def unmark_diverged(out: Path) -> None:
    with disk.writing(out / DIVERGED):
        (out / DIVERGED).unlink(missing_ok=True)


def diverged_after(out: Path) -> int | None:
    """After how many rounds the run in ``out`` diverged, None if it did not."""
    try:
        return int(read_json(out / DIVERGED)["rounds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def finished(out: Path) -> dict[str, Any] | None:
    """The summary of the run in ``out``, None if it did not finish or its results were not written."""
    try:
        summary = read_json(out / SUMMARY)
        return {**summary, "rounds": int(summary["rounds"])} if summary["status"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def finished_rounds(out: Path) -> int | None:
    """After how many rounds the run in ``out`` finished, None if it did not."""
    summary = finished(out)
    return None if summary is None else summary["rounds"]
