"""The title of a plan, kept next to its runs for their report.

Each plan has a file of its own, NAME.plan.json: a directory may hold the runs of several.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..rundir.files import write_atomically
from ..support.disk import WriteError
from ..support.inputs import read_json
from . import Experiment

SUFFIX = ".plan.json"


def write(grid: Experiment) -> None:
    """Keep the title of a plan whose runs are about to start."""
    content = json.dumps({"title": grid.title}) + "\n"
    for folder in {run.directory.parent for run in grid.runs}:
        path = folder / f"{grid.name}{SUFFIX}"
        # A run that cannot write there, either, says so; another job of this plan may be writing the same.
        with suppress(OSError, WriteError):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)


def common(folders: Iterable[Path]) -> str:
    """The title of the one plan whose runs are in these folders; empty where there are several plans, or none."""
    found = [_titles(folder) for folder in set(folders)]
    return found[0][0] if found and len(found[0]) == 1 and all(each == found[0] for each in found) else ""


def _titles(folder: Path) -> list[str]:
    titles = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(OSError, ValueError, TypeError, LookupError):
            titles.append(str(read_json(path)["title"]))
    return titles
