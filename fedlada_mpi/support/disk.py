"""Writing to disks that may be full, over quota or failing: every such failure is one line that names the file.

Files are created only under names that do not exist yet, so that nothing is ever written through a link.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    import h5py

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WriteError(UserError):
    """A file could not be written."""


@contextmanager
def writing(path: Path, cure: str = "then add --resume", needed: int = 0) -> Iterator[None]:
    """Raise an OSError of the block as WriteError, which says what to do.

    ``cure`` is the end of that sentence, ``needed`` the size of what is written, in bytes.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        first = "make it writable"
        if error.errno in _NO_ROOM:
            first = "make room"
            reason += _room(path, needed)
        elif error.errno in (errno.ENOENT, errno.ESTALE):
            first = "put its directory back"
        elif error.errno == errno.EIO:
            first = "check the disk"
        elif error.errno == errno.EEXIST and error.filename:
            first = f"remove {error.filename}"
        raise WriteError(f"cannot write {path}: {reason}: {first}, {cure}") from None


def _room(path: Path, needed: int) -> str:
    """`` (needs 12.0 MB, 3.4 MB free)``, or as much of it as is known."""
    known = [f"needs {needed / 1e6:.1f} MB"] if needed else []
    directory = next((parent for parent in path.parents if parent.is_dir()), None)
    if directory is not None:
        known.append(f"{shutil.disk_usage(directory).free / 1e6:.1f} MB free")
    return f" ({', '.join(known)})" if known else ""


def create(path: Path) -> int:
    """The descriptor of a new file; fails if the name is taken, also by a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_new(path: Path, content: bytes) -> None:
    """A new file with this content, on the disk when this returns."""
    handle = create(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink()
        raise


def append_line(path: Path, line: bytes) -> None:
    """A line of its own in a file that only its owner may read, on the disk when this returns.

    Behind a line that a kill or a full disk has cut short, it begins a new one: glued to it, both would be lost.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        whole = not size or os.pread(file.fileno(), 1, size - 1) == b"\n"
        file.write((b"" if whole else b"\n") + line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete file or folder to its final name, and sync the directory to disk."""
    os.replace(temporary, final)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync a directory
            raise
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link, but never what a link leads to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # A folder is renamed first: half removed, it must not be taken for a complete one.
    if path.suffix != ".tmp":
        named, path = path, path.with_name(path.name + ".removed.tmp")
        shutil.rmtree(path, ignore_errors=True)
        os.replace(named, path)
    shutil.rmtree(path)


class _Disk(io.FileIO):
    """A file for HDF5 that reports every write as successful and keeps the error in ``error``.

    On a write that fails, HDF5 crashes the process, often only when the file is closed.
    """

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and self.error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None, /) -> int:
        try:
            return super().truncate(size) if self.error is None else size or 0
        except OSError as error:
            self.error = error
            return size or 0


@contextmanager
def new_hdf5(path: Path, **options: Any) -> Iterator[h5py.File]:
    """A new HDF5 file, on disk when the block is done; raises OSError if it could not be written."""
    import h5py

    with _Disk(create(path), "r+b") as disk:
        try:
            with h5py.File(disk, "w", **options) as file:
                yield file
        finally:
            if disk.error is not None:
                raise disk.error
        os.fsync(disk.fileno())
