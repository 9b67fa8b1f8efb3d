"""Runs that start at once: forked from a process that has imported torch and the like, which takes seconds.

    warm = WarmProcess()
    process = warm.start(command, environment) or subprocess.Popen(command, env=environment)

A forked run is what ``python -m fedlada_mpi.run`` is in a new interpreter: the warm process has imported libraries and
code of the package, but has started neither MPI nor CUDA nor threads, and has loaded no code of a user. A run is a
child of the process that asks for it, not of the warm one: it is signalled and waited for like any other, goes on
where either is killed, and its lock tells others so.

On systems other than Linux, and where the warm process ends or does not answer, ``start`` returns None.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

MODULE = "fedlada_mpi.run"
IMPORTED = (
    *("torch", "torch.fx", "torch.func", "h5py", "mpi4py", "numpy.ma", "importlib.metadata", "multiprocessing"),
    *("fedlada_mpi.models", "fedlada_mpi.session.plan", "fedlada_mpi.data.arrays", "fedlada_mpi.rundir.sinks"),
)
PER_RUN = "CUDA_VISIBLE_DEVICES"  # is read when CUDA starts; libraries read others when they are loaded
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SECONDS = 300.0  # for the imports; they may come from a busy file system
LONGEST = 1 << 17  # bytes of a request
_PR_SET_CHILD_SUBREAPER = 36


class ForkedRun:
    """A forked run, with what a grid uses of ``subprocess.Popen``."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self) -> int:
        code = self._ended(0)
        assert code is not None
        return code

    def _ended(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # the caller ignores SIGCHLD; as subprocess has it
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class WarmProcess:
    """The warm process, which starts with the first run and ends with this process."""

    def __init__(self) -> None:
        self.usable = sys.platform.startswith("linux")
        self.environment: dict[str, str] = {}  # that it was started with
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: IO[Any] | None = None
    ) -> ForkedRun | None:
        """A run that prints to the log, if there is one; None where it takes a new interpreter."""
        first = [sys.executable, "-m", MODULE]
        if not self.usable or list(command[: len(first)]) != first or "-n" in command:
            return None
        if self.process is None:
            try:
                self._launch(environment, log)
            except OSError:
                return None
        names = environment.keys() | self.environment.keys()
        if {name for name in names if environment.get(name) != self.environment.get(name)} - {PER_RUN}:
            return None
        request = {"arguments": command[len(first) :], "parent": os.getpid(), PER_RUN: environment.get(PER_RUN)}
        files = [1, 2] if log is None else [log.fileno()] * 2
        pid = self._ask(json.dumps(request).encode(), files)
        if pid is None:
            self.close()
            self.usable = False
            return None
        return ForkedRun(pid)

    def _launch(self, environment: Mapping[str, str], log: IO[Any] | None) -> None:
        self.environment = dict(environment)
        self.connection, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # It inherits that these are blocked, and keeps them so: they are for the runs.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its_own.fileno())],
                env=self.environment,
                pass_fds=[its_own.fileno()],
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            its_own.close()

    def _ask(self, request: bytes, files: Sequence[int]) -> int | None:
        """The process that the warm one has forked; None where it does not."""
        answer, to_answer = os.pipe()
        try:
            with _adopting():
                try:
                    socket.send_fds(self.connection, [request], [*files, to_answer])
                except OSError:  # it has ended, or the request is too long
                    return None
                finally:
                    os.close(to_answer)
                # The run itself answers. Where it cannot, nobody has the other end any more, and this is its end.
                waiting = select.poll()
                waiting.register(answer, select.POLLIN)
                return int(os.read(answer, 32) or 0) or None if waiting.poll(SECONDS * 1000) else None
        finally:
            os.close(answer)

    def close(self) -> None:
        """End the warm process, not the runs."""
        if self.process is not None:
            self.connection.close()
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def _adopting() -> Iterator[None]:
    """Within the block, a process whose parent has ended becomes a child of this one, if that was an ancestor."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def serve(connection: socket.socket) -> list[str]:
    """Fork a process for every request; returns in each of them, with its arguments. Ends with who asks."""
    while True:
        content, files, _, _ = socket.recv_fds(connection, LONGEST, 3)
        if not content:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for file in files:
                os.close(file)
            continue
        # A process between the two ends at once, which makes the run a child of who asks.
        between = os.getpid()
        if os.fork():
            os._exit(0)
        connection.close()
        return _become(json.loads(content), files, between)


def _become(request: Mapping[str, Any], files: Sequence[int], between: int) -> list[str]:
    """Take over what differs from run to run."""
    while os.getppid() == between:
        time.sleep(0.001)
    if os.getppid() != request["parent"]:
        os._exit(1)
    *printed, answer = files
    for number, file in enumerate(printed, 1):
        os.dup2(file, number)
        os.close(file)
    os.environ.pop(PER_RUN, None)
    if request[PER_RUN] is not None:
        os.environ[PER_RUN] = request[PER_RUN]
    import numpy as np

    np.random.seed()  # noqa: NPY002 as when it is imported; ``random`` does so by itself
    try:
        os.write(answer, str(os.getpid()).encode())
    except BrokenPipeError:  # who asked has given up, and started another
        os._exit(1)
    os.close(answer)
    # A Ctrl-C from before, until the run handles it itself: there is nothing to finish, or to explain.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    return list(request["arguments"])


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        for name in IMPORTED:
            importlib.import_module(name)
    except Exception:  # a run reports it
        os._exit(1)
    # By a sitecustomize, say. Threads that OpenBLAS has are not counted: it ends them before a fork.
    if threading.active_count() > 1 or "mpi4py.MPI" in sys.modules:
        os._exit(1)
    gc.collect()
    gc.freeze()  # runs would otherwise copy all that was imported when they first collect
    sys.argv = [sys.argv[0], *serve(connection)]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
