"""A lock file that names who is working in a directory, on one machine or across a cluster.

    with hold(directory):
        ...

A lock whose owner is gone does not block. On the same host, the process is looked up. A requeued SLURM job recognises
the lock of its earlier start. On other hosts, the owner's heartbeat, which renews the file's time, has stopped.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..support import disk
from ..support.errors import UserError
from ..support.inputs import read_json
from ..support.processes import is_alive, start_time

NAME = "run.lock"  # held by the run that writes to the directory
GRID = "grid.lock"  # held by a grid from before it starts that run until after its end
BEAT_SECONDS = 15.0  # between heartbeats
STALE_SECONDS = 180.0  # without a heartbeat, after which an owner on another host counts as gone
SILENT_SECONDS = 2.5 * BEAT_SECONDS  # the same, for the other ranks of a run that has lost the owner
UNWRITTEN_SECONDS = 5.0  # after which an empty lock counts as left by a process that was killed while it took it


class Busy(UserError):
    """Another process is working in the directory."""


def _me() -> dict[str, Any]:
    return {
        "token": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": start_time(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID", ""),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _age(path: Path) -> float:
    """Seconds since the last heartbeat, by the file system's clock: the hosts' clocks may differ."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()


def _read(path: Path) -> dict[str, Any] | None:
    """The owner of the lock: {} if the file does not name one, None if there is no file."""
    try:
        owner = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    kinds = {"pid": int, "restart": int, "host": str, "job": str}
    good = isinstance(owner, dict) and all(type(owner.get(name)) is kind for name, kind in kinds.items())
    return owner if good and 0 < owner["pid"] < 2**31 else {}


def owner(directory: Path, name: str = NAME) -> str | None:
    """Who holds the directory's lock, as text; None if no one does."""
    holder = _read(directory / name)
    if holder is None or _abandoned(directory / name, holder, _me()):
        return None
    return _describe(holder)


def refuse_if_held(directory: Path) -> None:
    """Raise Busy if a run is writing to the directory."""
    if holder := owner(directory):
        raise _busy(directory / NAME, holder)


def _busy(path: Path, holder: str) -> Busy:
    return Busy(f"{path.parent} is in use by {holder}: wait for it, or, if it is gone, rm {path}")


def _describe(holder: dict[str, Any]) -> str:
    job = f", SLURM job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{job}"


def _abandoned(path: Path, holder: dict[str, Any], me: dict[str, Any]) -> bool:
    if holder.get("host") == me["host"]:
        return not is_alive(holder["pid"], str(holder.get("started", "")))
    if holder.get("job") and holder["job"] == me["job"] and holder.get("restart", 0) < me["restart"]:
        return True
    if path.exists() and not path.is_file():  # not a lock, and not for us to remove
        return False
    try:
        return _age(path) > (STALE_SECONDS if holder else UNWRITTEN_SECONDS)
    except FileNotFoundError:
        return True
    except OSError:  # a directory we may read but not write
        return False


def _take(path: Path, me: dict[str, Any], gone: Container[tuple[str, int]] = ()) -> None:
    for _ in range(10):
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            holder = _read(path)
            if holder is None:
                continue
            if not holder and os.path.lexists(path) and not path.is_file():
                raise Busy(
                    f"{path} is not a regular file, as a lock is: move it away, or choose another directory"
                ) from None
            if not holder and not _abandoned(path, holder, me):
                time.sleep(1)
                continue
            if (holder.get("host"), holder.get("pid")) in gone:
                _await_silence(path, holder, me)
            elif not _abandoned(path, holder, me):
                raise _busy(path, _describe(holder)) from None
            _remove(path, holder)
            continue
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(me, file)
        except OSError:
            path.unlink()
            raise
        if _read(path) == me:  # writing may take so long that another process takes the lock for abandoned
            return
    raise Busy(f"{path} keeps changing hands: try again")


def _await_silence(path: Path, holder: dict[str, Any], me: dict[str, Any]) -> None:
    """Wait for a holder that seems to be lost until it should have renewed its lock; raises Busy if it does."""
    with suppress(FileNotFoundError):
        before = path.stat().st_mtime
        while not _abandoned(path, holder, me) and _age(path) < SILENT_SECONDS:
            time.sleep(0.5)
            if path.stat().st_mtime != before:
                raise _busy(path, _describe(holder))


def is_mine(directory: Path, name: str = NAME) -> bool:
    """Whether this process holds the lock."""
    holder = _read(directory / name) or {}
    return (holder.get("host"), holder.get("pid")) == (socket.gethostname(), os.getpid())


def _remove(path: Path, holder: dict[str, Any]) -> None:
    """Remove an abandoned lock, but not the lock of another process that has taken its place meanwhile."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) != holder:
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


_held: dict[Path, dict[str, Any]] = {}  # the locks of this process, with what was written to them


def take_again(directory: Path, name: str = NAME) -> None:
    """Write a lock of this process again, if it was removed; raises Busy if another process has taken it since."""
    path = directory / name
    if (me := _held.get(path)) and (_read(path) or {}).get("token") != me["token"]:
        with disk.writing(path):
            _take(path, me)


@contextmanager
def hold(directory: Path, name: str = NAME, gone: Container[tuple[str, int]] = ()) -> Iterator[None]:
    """Hold the directory's lock inside the block; raises Busy if another process does.

    ``gone``: hosts and pids of processes that seem to be lost; their lock is taken over once its heartbeat has stopped.
    """
    path, me, done = directory / name, _me(), threading.Event()
    with disk.writing(path, "then run it again"):
        directory.mkdir(parents=True, exist_ok=True)
        _take(path, me, gone)
    _held[path] = me

    def beat() -> None:
        while not done.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        del _held[path]
        holder = _read(path)
        if holder and holder.get("token") == me["token"]:
            with suppress(OSError):  # left behind, it would not block anyone
                path.unlink()
