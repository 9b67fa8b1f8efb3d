"""The digest of the data that a run was trained on, read without torch and MPI."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from .files import DATA, complete_checkpoints


def of_run(out: Path, summary: Any) -> str:
    """As the summary has it, else the newest checkpoint; empty where neither does."""
    about = summary.get("data") if isinstance(summary, dict) else None
    recorded = about.get("digest") if isinstance(about, dict) else None
    return str(recorded or "") or _of_checkpoint(out)


def _of_checkpoint(out: Path) -> str:
    for saved in reversed(complete_checkpoints(out)):
        import h5py  # here, because it is slow to import and finished runs do not need it

        # What h5py raises on a damaged file.
        with suppress(OSError, KeyError, TypeError, ValueError, RuntimeError), h5py.File(saved / "server.h5") as file:
            return str(file.attrs.get(DATA, ""))
    return ""
