"""A lock file that names who is working in a directory, on one machine or across a cluster.

    with hold(directory):
        ...

A lock whose owner is gone does not block. On the same machine, the process is looked up. A requeued SLURM job
recognises the lock of its earlier start. On other machines, and in other containers, which may bear the same host name,
the owner's heartbeat, which renews the file's time, has stopped. An owner whose lock was taken does not renew it, and
``keep`` ends its writing.
"""

from __future__ import annotations

import json
import os
import sys
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
from ..support.processes import ProcessId, is_alive, this_process

NAME = "run.lock"  # held by the run that writes to the directory
GRID = "grid.lock"  # held by a grid from before it starts that run until after its end
BEAT_SECONDS = 15.0  # between heartbeats
STALE_SECONDS = 180.0  # without a heartbeat, after which an owner on another host counts as gone
SILENT_SECONDS = 2.5 * BEAT_SECONDS  # the same, for the other ranks of a run that has lost the owner
UNWRITTEN_SECONDS = 5.0  # after which an empty lock counts as left by a process that was killed while it took it


_held: dict[Path, dict[str, Any]] = {}  # the locks of this process, with what is written in them


class Busy(UserError):
    """Another process is working in the directory."""


def _me() -> dict[str, Any]:
    return {
        "token": uuid.uuid4().hex,
        **this_process()._asdict(),
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


def _process(holder: dict[str, Any]) -> ProcessId:
    """Who holds a lock; earlier versions wrote less."""
    more = (str(holder.get(name, "")) for name in ProcessId._fields[2:])
    return ProcessId(holder.get("host", ""), holder.get("pid", 0), *more)


def _abandoned(path: Path, holder: dict[str, Any], me: dict[str, Any]) -> bool:
    if holder.get("host") == me["host"] and ("boot" not in holder or _process(holder).is_visible):
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


def _take(path: Path, me: dict[str, Any], gone: Container[ProcessId] = ()) -> None:
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
            if _process(holder) in gone:
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
    return _process(_read(directory / name) or {}) == this_process()


def keep(directory: Path, name: str = NAME) -> None:
    """Raise Busy if another process has taken the lock that this one held: what both write would be mixed.

    A lock that was removed is taken again.
    """
    path = directory / name
    me = _held.get(path)
    if me is None:
        return
    holder = _read(path)
    if holder is None:
        with disk.writing(path):
            _take(path, me)
    # A file that cannot be read for once says nothing.
    elif holder and holder.get("token") != me["token"]:
        raise Busy(f"{path} was taken over by {_describe(holder)}: nothing more is written there")


def _remove(path: Path, holder: dict[str, Any]) -> None:
    """Remove an abandoned lock, but not the lock of another process that has taken its place meanwhile."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) != holder:
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


@contextmanager
def hold(directory: Path, name: str = NAME, gone: Container[ProcessId] = ()) -> Iterator[None]:
    """Hold the directory's lock inside the block; raises Busy if another process does.

    ``gone``: processes that seem to be lost; their lock is taken over once its heartbeat has stopped.
    """
    path, me, done = directory / name, _me(), threading.Event()
    with disk.writing(path, "then run it again"):
        directory.mkdir(parents=True, exist_ok=True)
        _take(path, me, gone)
    _held[path] = me

    def beat() -> None:
        while not done.wait(BEAT_SECONDS):
            try:
                keep(directory, name)
                os.utime(path)
            except Busy as error:
                sys.stderr.write(f"note: {error}\n")
                return
            except (OSError, disk.WriteError):  # while the directory is moved, say
                continue

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
