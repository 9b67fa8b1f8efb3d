"""Writing the files of a run, each complete or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..support import disk


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


def checkpoint_round(folder: Path) -> int | None:
    """The round of a complete checkpoint's folder; None if it is none."""
    number = folder.name.removeprefix("round_")
    return int(number) if folder.name.startswith("round_") and number.isdecimal() else None
