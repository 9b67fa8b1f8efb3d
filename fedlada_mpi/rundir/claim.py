"""Whether a run may use its output directory: it must not mix with another run, or overwrite one by accident."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..settings import Config
from ..support import disk
from ..support.errors import UserError
from ..support.inputs import read_json
from . import checkpoint, client_values, files, metrics, results, sinks

FINISHED = -1
_FILES = (
    *("config.json", "metrics.jsonl", metrics.DAMAGED, client_values.CLIENTS, results.SUMMARY, results.MODEL),
    *(results.BEST, results.DIVERGED, sinks.IDS, files.CHECKPOINTS, files.PROFILES, "tensorboard"),
)
_FOLDERS = {
    files.CHECKPOINTS: files.CHECKPOINT_NAMES,
    files.PROFILES: "*.json.gz*",
    "tensorboard": "events.out.tfevents.*",
}  # what a run writes there


def claim(config: Config, resume: bool, overwrite: bool, accept_changed_code: bool = False) -> int:
    """The round to start after: 0 for a new run, FINISHED where there is nothing left to do."""
    out = Path(config.out)
    _refuse_other_files(out)
    if resume:
        start = checkpoint.latest(out, config)
        if start and not accept_changed_code:
            checkpoint.refuse_other_code(out, start, config)
        if start > config.rounds:
            raise UserError(f"--resume: {out} is at round {start}, past --rounds {config.rounds}: ask for more rounds")
        # A checkpoint of the last round is not enough: the run may have been killed before it wrote its results.
        written = results.finished_rounds(out) == start and (out / results.MODEL).is_file()
        if not start:
            _refuse_lost_results(out, config, written)
        if start == config.rounds and written:
            return FINISHED
    elif _is_run(out) and not overwrite:
        raise UserError(
            f"{out} already holds a run: add --resume to go on, --overwrite to discard it, or another --out"
        )
    else:
        start = 0
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(f"--out: cannot write to {out}: {error.strerror}; choose another directory") from None
    return start


def _is_run(out: Path) -> bool:
    """Whether the directory has the files of a run: its metrics, or its settings from before the first round."""
    return (out / "metrics.jsonl").exists() or "algorithm" in _settings(out)


def _settings(out: Path) -> dict[str, Any]:
    try:
        values = read_json(out / "config.json")
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _refuse_other_files(out: Path) -> None:
    """Raise if files that a run would overwrite are there, but no run: they belong to the user."""
    for name in _FOLDERS:
        path = out / name
        if path.is_symlink() and not path.is_dir():
            raise UserError(f"--out: {path} is a link to {path.readlink()}, expected a folder: make it, or rm {path}")
    present = [name for name in _FILES if (out / name).is_symlink() or (out / name).exists()]
    # An empty folder may be a link to another disk, made for this run.
    empty = [name for name in _FOLDERS if (out / name).is_dir() and not any((out / name).iterdir())]
    present = [name for name in present if name not in empty]
    if present and not _is_run(out):
        raise UserError(f"--out: {out} holds {', '.join(present)}, but no run: move them, or choose another directory")
    for name in present:
        path = out / name
        if path.exists() and not (path.is_dir() if name in _FOLDERS else path.is_file()):
            kind = "directory" if name in _FOLDERS else "regular file"
            raise UserError(f"--out: {path} is not a {kind}, as a run needs it: move it, or choose another directory")


def _refuse_lost_results(out: Path, config: Config, of_no_rounds: bool) -> None:
    """Raise if there are results but no checkpoint, with which ``--resume`` would start from the beginning.

    Those ``of_no_rounds`` need none.
    """
    if not of_no_rounds and ((out / results.MODEL).exists() or (out / results.SUMMARY).exists()):
        raise UserError(
            f"--resume: {out} holds results but no checkpoint to continue from: use --overwrite to start again, "
            "or choose another --out"
        )
    checkpoint.refuse_other_settings(out, _settings(out), config)


def clear(out: Path) -> None:
    """Remove the files of an earlier run; last those by which ``_is_run`` knows it.

    A folder may be a link to another disk, or hold other files: only what runs write there is removed.
    """
    for name in reversed(_FILES):
        path = out / name
        with disk.writing(path):
            if not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            for own in path.glob(_FOLDERS[name]):
                disk.remove(own)
            if not path.is_symlink():
                with suppress(OSError):
                    path.rmdir()
