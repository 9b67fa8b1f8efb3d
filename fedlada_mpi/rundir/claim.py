"""Whether a run may use its output directory: never two runs in one, nothing lost by accident."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..config import Config
from ..errors import UserError
from . import checkpoint, results

FINISHED = -1
_FILES = ("config.json", "metrics.jsonl", results.SUMMARY, results.MODEL, "checkpoint", "tensorboard")


def claim(config: Config, resume: bool, overwrite: bool) -> int:
    """The round to start after: 0 for a new run, FINISHED where there is nothing left to do."""
    out = Path(config.out)
    if resume:
        start = checkpoint.latest(out, config)
        # A checkpoint of the last round is not enough: the run may have been killed before it wrote its results.
        written = results.finished_rounds(out) == start and (out / results.MODEL).is_file()
        if start >= config.rounds and written and start > 0:
            print(f"{out} is finished: {start} rounds of {config.rounds}")
            return FINISHED
        if start > config.rounds:
            raise UserError(f"--resume: {out} is at round {start}, past --rounds {config.rounds}: ask for more rounds")
    elif (out / "metrics.jsonl").exists() and not overwrite:
        raise UserError(
            f"{out} already holds a run: add --resume to go on, --overwrite to discard it, or another --out"
        )
    else:
        start = 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out: cannot write to {out}: {error.strerror}; choose another directory") from None
    return start


def clear(out: Path) -> None:
    """Make way for a new run: remove what an earlier one left."""
    for name in _FILES:
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
