"""Ranks that ``-n`` has started: until they have joined, while they run, and when they are to end.

A rank that ends before all have joined leaves the others waiting inside MPI for ever, where no signal reaches them. So
until then the process that started them looks after them; later they do so themselves (``mpi/watchdog.py``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from .errors import NO_ANSWER
from .processes import ENDED, children, exit_status, session_members, state
from .start_record import LIMIT, StartRecord

SAME = 0.2  # seconds within which two signals count as one
AFTER_SECOND = 5.0  # seconds from a second signal until ranks that have not ended are killed
TICK = 0.05  # seconds between looks at the ranks
GRACE = 5.0  # seconds without a rank that has ended, in which the others may still join or end by themselves
TO_END = 3.0  # seconds for mpirun to end the ranks before they are killed
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> Callable[[], None] | None:
    """What makes the kernel send a new process SIGTERM when this one ends, even by SIGKILL; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


class Signals:
    """Which signals have come, and when."""

    number = 0  # of the first
    first: float | None = None
    second: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self.number = now, number
        elif now - self.first > SAME:
            self.second = self.second or now


class StartedRanks:
    """The ranks of a start, and the mpirun that has started them."""

    def __init__(
        self, process: subprocess.Popen[bytes], module: str, count: int, record: StartRecord, received: Signals
    ):
        self.process, self.module, self.count, self.record, self.received = process, module, count, record, received
        self.joined = self.asked_to_stop = self.told_to_end = False
        self.seen: set[int] = set()  # rank processes
        self.ticks = self.ticks_missing = 0

    def wait(self) -> int:
        """Until they have ended, or were ended; returns the exit code."""
        while not self._has_ended():
            time.sleep(TICK)
            self.joined = self.joined or self.record.joined
            if self.joined:
                self._pass_on_signals()
            elif self.received.first is not None:
                self.end_all()
                sys.stderr.write("\nstopped before all ranks had started\n")
                return 128 + self.received.number
            elif why := self._start_failed():
                self.end_all()
                sys.stderr.write(f"error: {why}: run it again\n")
                return NO_ANSWER
        self._kill_orphans()
        code = exit_status(self.process.wait())
        again = "run it again, with --resume to go on from a checkpoint"
        if self.process.returncode < 0 and self.received.second is None:
            sys.stderr.write(f"error: mpirun was ended by signal {-self.process.returncode}, and its ranks: {again}\n")
        elif code == 0 and not self.record.complete:  # which mpirun says also where all were killed
            sys.stderr.write(f"error: all ranks were lost: {again}\n")
            return NO_ANSWER
        return code

    def _pass_on_signals(self) -> None:
        """The first signal asks the ranks to stop after the round, the second ends them."""
        if self.received.first is not None and not self.asked_to_stop:
            self.asked_to_stop = True
            self._signal(signal.SIGUSR1)  # mpirun passes it on; with any other, it ends the ranks
            if self.received.number == signal.SIGINT:
                sys.stderr.write("\nstopping after this round; Ctrl-C again stops at once\n")
        if self.received.second is not None:
            if not self.told_to_end:
                self.told_to_end = True
                self._signal(signal.SIGTERM)
            if time.monotonic() - self.received.second > AFTER_SECOND:
                self.end_all()

    def _start_failed(self) -> str:
        """Why the ranks will not all join; empty while they may. Time is counted in ticks, as in ``WaitLimit``."""
        self.ticks += 1
        new = {pid for pid in children(self.process.pid) - self.seen if self._is_rank(pid)}
        self.seen |= new
        ended = [pid for pid in self.seen if state(pid) in ENDED]
        # One that ends between two looks is never seen: what counts is how many there should be.
        missing = self.count - len(self.seen) + len(ended) if self.seen else 0
        self.ticks_missing = self.ticks_missing + 1 if missing > 0 and not new else 0
        if self.ticks_missing * TICK > GRACE:
            which = f"process {ended[0]}" if ended else f"{missing} of {self.count} processes"
            return f"{which} {'has' if ended or missing == 1 else 'have'} ended before all ranks had started"
        if self.record.limit and self.ticks * TICK > self.record.limit:
            return f"the ranks have not started within {self.record.limit:g} s ({LIMIT} sets the limit)"
        return ""

    def _is_rank(self, pid: int) -> bool:
        """By its command line: until a new process is the program it was forked for, it has that of mpirun."""
        with suppress(OSError):
            words, mpirun = (Path(f"/proc/{number}/cmdline").read_bytes() for number in (pid, self.process.pid))
            return self.module.encode() in words and words != mpirun
        return False

    def _signal(self, number: int) -> None:
        # Not by ``Popen``, which would free the pid of a process that has ended.
        os.kill(self.process.pid, number)

    def _has_ended(self) -> bool:
        """Whether mpirun has; its pid, by which the ranks' session is known, is kept until ``process.wait``."""
        return self.process.returncode is not None or self._ending() is not None

    def _ending(self) -> os.waitid_result | None:
        """How mpirun has ended, if ``process.wait`` has not taken note of it."""
        if self.process.returncode is not None:
            return None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def end_all(self) -> None:
        """End mpirun and every rank that is still there."""
        if self.process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        end = time.monotonic() + TO_END
        while not self._has_ended() and time.monotonic() < end:
            time.sleep(TICK)
        if not self._has_ended():
            self._signal(signal.SIGKILL)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._kill_orphans()
        self.process.wait()

    def _kill_orphans(self) -> None:
        """Ranks that have outlived mpirun; where it has ended by itself, it has waited for them."""
        ending, end = self._ending(), time.monotonic() + TO_END
        killed = ending is not None and ending.si_code != os.CLD_EXITED
        while killed and (left := session_members(self.process.pid)) and time.monotonic() < end:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(TICK)
