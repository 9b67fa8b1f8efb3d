"""Writing the files of a run so that each is there complete or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which takes the place of ``path`` when the block is done."""
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    os.replace(temporary, path)


def to_json(value: Any, indent: int | None = None) -> str:
    """As ``json.dumps``, with null for numbers that are not finite, which JSON does not have."""
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


def write_atomically(path: Path, text: str) -> None:
    with replacing(path) as temporary, open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
