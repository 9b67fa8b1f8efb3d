"""Writing the files of a run so that each is there complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which takes the place of ``path`` when the block is done."""
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    os.replace(temporary, path)


def write_atomically(path: Path, text: str) -> None:
    with replacing(path) as temporary, open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
