"""The files of a run: each written so that it is there complete or not at all; and the names of checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..support import disk

CHECKPOINTS = "checkpoint"  # the folder of a run that they are in
CHECKPOINT_NAMES = "round_*"  # of their folders there, also of unfinished ones
DATA = "data"  # attribute of a checkpoint: the digest of the shards
PROFILES = "profile"  # the folder of a run that its traces are in


def checkpoint_folder(out: Path, t: int) -> Path:
    """The checkpoint after round ``t`` of the run in ``out``."""
    return out / CHECKPOINTS / CHECKPOINT_NAMES.replace("*", f"{t:06d}")


def checkpoint_round(folder: Path) -> int:
    """The round after which a complete checkpoint was written; a ValueError for any other folder."""
    return int(_number(folder))


def complete_checkpoints(out: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = (out / CHECKPOINTS).glob(CHECKPOINT_NAMES)
    return sorted((folder for folder in folders if _number(folder).isdecimal()), key=checkpoint_round)


def remove_checkpoints(out: Path) -> None:
    """Also unfinished ones; what cannot be removed stays."""
    for folder in (out / CHECKPOINTS).glob(CHECKPOINT_NAMES):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # such as where there never was one, or where there are other files
        (out / CHECKPOINTS).rmdir()


def _number(folder: Path) -> str:
    return folder.name.removeprefix(CHECKPOINT_NAMES.rstrip("*"))


def to_json(value: Any, indent: int | None = None) -> str:
    """As ``json.dumps``, with null for NaN and infinity, which JSON does not have."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a temporary file, and rename it to ``path``."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(path.name + ".tmp")
    with disk.writing(path, needed=len(data)):
        # A file was left by a run that was killed; a link is not from a run, and ``write_new`` fails on it.
        if not temporary.is_symlink():
            temporary.unlink(missing_ok=True)
        disk.write_new(temporary, data)
        disk.publish(temporary, path)
