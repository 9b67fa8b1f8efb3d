"""Bounds on raw data: only regular files are read, and sizes are checked before memory is taken for them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...support.errors import UserError
from ...support.processes import available_memory

OPENERS: dict[bytes, Callable[[Path, str], Any]] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}

# What zipfile and its decompressors raise on a damaged archive.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError, struct.error)


def check_memory(needed: int, what: object) -> None:
    if needed > (available := available_memory()):
        raise UserError(
            f"{what}: {needed / 1e9:,.1f} GB of data, but only {available / 1e9:,.1f} GB of memory are free: "
            "use a part of it, or a larger machine"
        )


def empty_images(count: int, shape: tuple[int, ...], what: object) -> np.ndarray:
    """Room for ``count`` images."""
    check_memory(count * int(np.prod(shape, dtype=object)), what)
    return np.empty((count, *shape), dtype=np.uint8)


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes; opening a pipe or a device could block."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file, expected a file of data: remove it")
    check_size(path.stat().st_size, most, path)
    return path.read_bytes()


def read_member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """The content of a member; zipfile never reads more than the size that the member declares."""
    check_size(archive.getinfo(name).file_size, most, f"{archive.filename}: {name}")
    return archive.read(name)


def check_size(size: int, most: int, what: object) -> None:
    if size > most:
        raise UserError(f"{what}: {size} bytes, expected at most {most}: copy or download it again")


class Decompressed:
    """The decompressed content of a file as a stream that ends with an error after ``most`` bytes."""

    def __init__(self, path: Path, most: int) -> None:
        with path.open("rb") as file:
            start = file.read(2)
        self.stream = OPENERS.get(start, Path.open)(path, "rb")
        self.path, self.most, self.done = path, most, 0

    def read(self, size: int) -> bytes:
        block: bytes = self.stream.read(size)
        self.done += len(block)
        check_size(self.done, self.most, f"{self.path} decompressed")
        return block

    def close(self) -> None:
        self.stream.close()
