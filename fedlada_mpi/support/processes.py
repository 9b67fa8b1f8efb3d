"""Processes of this machine: usable cores, memory, whether a process is alive, and a map over worker processes."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def usable_cores() -> int:
    """The cores this process may use, which a batch system or a launcher can limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory() -> float:
    """The machine's memory in bytes; infinite where the system does not tell."""
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    return float(math.prod(map(os.sysconf, names))) if set(names) <= os.sysconf_names.keys() else math.inf


def available_memory() -> float:
    """Free memory of this machine in bytes; all its memory where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return machine_memory()


def state(pid: int) -> str:
    """A process's state: R running, S sleeping, D waiting for a device, T stopped, Z ended; X if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return "X"


def start_time(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty where /proc does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""


def is_alive(pid: int, started: str = "") -> bool:
    """Whether the process exists; with ``started``, whether it is the one that started then (pids are reused)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not started or start_time(pid) in ("", started)


def process_map(function: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """``map(function, items)`` over worker processes, results in order; in this process where one worker is enough.

    Workers are new processes, not forks: a fork of a process that uses MPI, CUDA or threads may hang. They do not
    import the caller's main module, so a script needs no ``if __name__ == "__main__"``.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        yield from map(function, items)
        return
    from loky import ProcessPoolExecutor

    pool = ProcessPoolExecutor(workers)
    try:
        # Not pool.map: after a Ctrl-C it cancels what is pending, and loky's thread then fails with a traceback.
        pending = deque(pool.submit(function, item) for item in items)
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(kill_workers=True)
