"""What the ranks of one start tell the process that started them: that they have joined, and how the run has ended.

A start has a folder of its own, whose path the ranks have in their environment. What an earlier run has left in the
output directory, or mpirun's exit status, does not tell: that is 0 also where all ranks were killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from .errors import UserError

LIMIT, LIMIT_SECONDS = "FEDLADA_START_LIMIT", 300.0  # the variable that changes it
FOLDER = "FEDLADA_START"  # the variable with the folder's path
_JOINED, _COMPLETE = "joined", "complete"
_folder = os.environ.pop(FOLDER, "")  # taken out: what a rank starts itself does not speak for the rank


class StartRecord:
    """The folder, on the side of the process that starts the ranks; it is removed at the end of the block."""

    def __enter__(self) -> StartRecord:
        self.limit = start_limit()
        self.folder = Path(tempfile.mkdtemp(prefix="fedlada-start-"))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def joined(self) -> bool:
        """Whether all ranks have joined the world of the run."""
        return (self.folder / _JOINED).exists()

    @property
    def complete(self) -> bool:
        """Whether a rank has come to the end of the program with status 0."""
        return (self.folder / _COMPLETE).exists()


def report_joined() -> None:
    _report(_JOINED)


def report_end(status: int) -> None:
    if status == 0:
        _report(_COMPLETE)


def _report(name: str) -> None:
    if _folder:
        with suppress(OSError):
            os.makedirs(_folder, mode=0o700, exist_ok=True)  # in a run of weeks, a system may have tidied it away
            Path(_folder, name).touch()


def start_limit() -> float:
    """Seconds in which all ranks must have joined; 0 for no limit."""
    given = os.environ.get(LIMIT, "")
    with suppress(ValueError):
        seconds = float(given or LIMIT_SECONDS)
        if 0 <= seconds < float("inf"):
            return seconds
    raise UserError(f"{LIMIT}: got {given!r}, expected seconds from 0 (no limit)")
