"""Processes: usable cores, memory, which process is which and whether it is alive, a map over worker processes."""

from __future__ import annotations

import math
import os
import platform
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

ENDED = "ZX"  # states of processes that have ended, as ``state`` has them

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """What prints within the block ends there, and quietly, where nobody reads on, as in ``... | head``."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def bound_cores() -> int:
    """The cores this process may run on, which a batch system or a launcher can limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """As many as this process can keep busy."""
    return max(1, int(min(bound_cores(), core_limit())))


CGROUPS = Path("/sys/fs/cgroup")


def core_limit() -> float:
    """How many cores' time the processes of a container, or of another control group, may use together; infinite
    without such a limit. Of the cores that they see, the others would only make them wait."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        return min((limit for line in lines for limit in _core_limits(line)), default=math.inf)
    return math.inf


def _core_limits(line: str) -> Iterator[float]:
    """Those of a group, by its line in /proc/PID/cgroup, and of the groups that it is in."""
    _, controllers, place = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    root = CGROUPS / controllers
    if not root.exists():  # Red Hat 7 names them in another order here, but each has a link of its own
        root = CGROUPS / "cpu"
    # Of a container, only what is below its own group may be there.
    folder = root / place.lstrip("/")
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):
            if controllers:
                allowed, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            else:  # the second version of control groups, in which "max" is no limit
                allowed, period = map(int, (group / "cpu.max").read_text().split())
            if allowed > 0 < period:
                yield allowed / period
        if group == root:
            return


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


def _stat(pid: int) -> list[str]:
    """What /proc tells of a process, from its state on; raises OSError or IndexError."""
    # That of its first thread: qemu, where it emulates another architecture, shows a process its own /proc/PID/stat
    # with a start that is not the kernel's, which all other processes see.
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def state(pid: int) -> str:
    """A process's state: R running, S sleeping, D waiting for a device, T stopped, Z ended; X if it does not exist."""
    try:
        return _stat(pid)[0]
    except (OSError, IndexError):
        return "X"


def start_time(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty where /proc does not tell."""
    try:
        return _stat(pid)[19]
    except (OSError, IndexError):
        return ""


def since_start() -> float:
    """Seconds since this process began, imports included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(start_time(os.getpid())) / os.sysconf("SC_CLK_TCK")


def peak_memory() -> int:
    """The most bytes of the machine's memory that this process has had at once; 0 where /proc does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def is_alive(pid: int, started: str = "") -> bool:
    """Whether the process has not ended; with ``started``, whether it is the one that started then: pids are reused."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    if state(pid) == "Z":  # only its parent still has to take note of that
        return False
    return not started or start_time(pid) in ("", started)


class ProcessId(NamedTuple):
    """One process among those of all machines: a host name may be that of several containers, and pids are reused.

    What the system does not tell, or an earlier version did not write, is empty.
    """

    host: str
    pid: int
    started: str = ""  # ``start_time``
    boot: str = ""  # of the kernel that runs it
    namespace: str = ""  # in which its pid counts

    @property
    def is_visible(self) -> bool:
        """Whether the pid means the same here: this process runs on the same machine, and in the same container."""
        here = this_process()
        return self[3:] == here[3:] and bool(self.boot or self.host == here.host)

    @property
    def state(self) -> str:
        """As ``state`` has it; X also if its pid is another process's now."""
        now = state(self.pid)
        return now if not self.started or start_time(self.pid) == self.started else "X"

    def kill(self) -> None:
        """End it at once; does nothing if it has ended, or may be a process of another machine or container."""
        if not self.is_visible:
            return
        with suppress(OSError):
            # The handle stays with this process, whatever becomes of its pid.
            handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
            try:
                if self.state == "X":
                    return
                if handle is None:
                    os.kill(self.pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                if handle is not None:
                    os.close(handle)


def this_process() -> ProcessId:
    pid = os.getpid()
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return ProcessId(platform.node(), pid, start_time(pid), boot, namespace)


def children(pid: int) -> set[int]:
    """The processes that a process has started and not waited for; none where /proc does not tell."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def session_members(session: int) -> list[int]:
    """The processes of a session that have not ended; none where /proc does not tell."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_member(path, session)]


def _is_member(path: Path, session: int) -> bool:
    try:
        now, _, _, number = (path / "stat").read_text().rsplit(")", 1)[1].split()[:4]
    except (OSError, IndexError, ValueError):
        return False
    return now not in ENDED and int(number) == session


def exit_status(returncode: int) -> int:
    """As a shell has it: 128 and the number of the signal that ended a process."""
    return returncode if returncode >= 0 else 128 - returncode


def process_map(function: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """``map(function, items)`` over worker processes, results in order; in this process where one worker is enough.

    Workers are new processes, not forks: a fork of a process that uses MPI, CUDA or threads may hang. They do not
    import the caller's main module, so a script needs no ``if __name__ == "__main__"``. Where they cannot start, or one
    is ended from outside, this process does what is left: ``function`` may be called twice for an item.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        yield from map(function, items)
        return
    from loky import BrokenProcessPool, ProcessPoolExecutor

    done = 0
    pool = ProcessPoolExecutor(workers)
    try:
        # Not pool.map: after a Ctrl-C it cancels what is pending, and loky's thread then fails with a traceback.
        pending = deque(pool.submit(function, item) for item in items)
        while pending:
            yield pending.popleft().result()
            done += 1
    except BrokenProcessPool:
        pass
    finally:
        pool.shutdown(kill_workers=True)
    yield from map(function, items[done:])
