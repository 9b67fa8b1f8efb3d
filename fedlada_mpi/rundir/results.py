"""The results of a run: ``model.pt``, and ``summary.json``, which states the round that both are of."""

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


def write(out: Path, model: Mapping[str, Tensor], summary: Mapping[str, Any]) -> None:
    """Replace the results; a summary that is there always belongs to the model that is there."""
    with disk.writing(out / SUMMARY):
        (out / SUMMARY).unlink(missing_ok=True)
    write_model(out / MODEL, model)
    write_atomically(out / SUMMARY, to_json(summary, indent=2) + "\n")


def write_model(path: Path, model: Mapping[str, Tensor]) -> None:
    import torch  # readers of results need not wait for it

    content = io.BytesIO()  # on a full disk, torch would end the process
    torch.save(model, content)
    write_atomically(path, content.getvalue())


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
