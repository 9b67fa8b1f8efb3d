"""Checksums of files, computed once per file and node.

A file whose checksum was right is remembered under ``$XDG_CACHE_HOME/fedlada_mpi`` (``~/.cache``), in one file per
host with a line per verdict. Lines are only appended, so ranks may write at once, and a damaged line is just no entry.
Where nothing can be remembered, files are checked every time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..support.processes import usable_cores

BLOCK = 1 << 20
MAX_CACHE_BYTES = 1 << 20  # about 16,000 verdicts; then it starts over
# A file that changes twice within a tick of its time stamps looks unchanged: one that is this young is not remembered.
SETTLED_SECONDS = 2.0


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def first_wrong(checksums: Mapping[Path, str], trust_cache: bool = True) -> Path | None:
    """The first file whose sha256 is not the given one; those known to be right are not read."""
    cache, now = cache_file(), time.time()
    known = _read(cache) if trust_cache else set()
    status = {path: path.stat() for path in checksums}
    keys = {path: _key(path, status[path], checksum) for path, checksum in checksums.items()}
    unknown = [path for path in checksums if keys[path] not in known]
    # hashlib releases the interpreter lock, so threads hash side by side.
    with ThreadPoolExecutor(min(len(unknown), usable_cores()) or 1) as pool:
        digests = dict(zip(unknown, pool.map(sha256, unknown), strict=True))
    right = [path for path in unknown if digests[path] == checksums[path]]
    settled = [path for path in right if now - max(status[path].st_mtime, status[path].st_ctime) > SETTLED_SECONDS]
    _append(cache, [keys[path] for path in settled])
    return next((path for path in unknown if digests[path] != checksums[path]), None)


def cache_file() -> Path:
    """Of this host, as nodes may share a home directory but not what is mounted in it."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder, "fedlada_mpi", f"verified-{socket.gethostname()}")


def _key(path: Path, status: os.stat_result, checksum: str) -> str:
    """Changes whenever the file, or what it should contain, does."""
    about = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return hashlib.sha256(repr((os.fspath(path.absolute()), about, checksum)).encode("utf8", "replace")).hexdigest()


def _read(cache: Path) -> set[str]:
    # A pipe or a device in its place would block.
    if not cache.is_file():
        return set()
    try:
        with cache.open("rb") as file:
            return set(file.read(MAX_CACHE_BYTES).decode("ascii", "replace").split("\n"))
    except OSError:
        return set()


def _append(cache: Path, keys: list[str]) -> None:
    if not keys or (cache.exists() and not cache.is_file()):
        return
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        if cache.exists() and cache.stat().st_size > MAX_CACHE_BYTES - BLOCK // 16:
            cache.unlink()
        # In one write, from the start of a line: what a writer left unfinished does not reach into it.
        with cache.open("ab", buffering=0) as file:
            file.write("".join(f"\n{key}\n" for key in keys).encode())
