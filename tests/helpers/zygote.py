"""Ranks that start in a fraction of a second: forked from a process that has imported everything but started no MPI.

    with Zygote() as zygote:
        subprocess.run([mpirun, "-n", "4", *zygote.command, "departing", ...])     # departing.main([...])

mpirun starts a small process for every rank: it passes on its environment and files, waits, and ends as the rank does.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

CLIENT = """
import array, json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect(sys.argv[1])
    s.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
    s.sendall(json.dumps([dict(os.environ), sys.argv[2:], os.getcwd()]).encode() + b"\\n")
    file = s.makefile()
    pid = int(file.readline())
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: os.kill(pid, n))
    code = int(file.readline() or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Zygote:
    """A process of its own, so that its user may have started MPI."""

    def __init__(self) -> None:
        self.path = str(Path(tempfile.mkdtemp(dir="/tmp")) / "socket")
        ready, told = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.execv(sys.executable, [sys.executable, __file__, self.path, str(_inheritable(told))])
        os.close(told)
        os.read(ready, 1)
        self.command = [sys.executable, "-I", "-S", "-c", CLIENT, self.path]

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _inheritable(handle: int) -> int:
    os.set_inheritable(handle, True)
    return handle


def serve(path: str, ready: int) -> None:
    import mpi4py

    mpi4py.rc.initialize = False
    import fedlada_mpi.session  # noqa: F401

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        os.write(ready, b"r")
        children: dict[int, socket.socket] = {}
        threading.Thread(target=_reap, args=(children,), daemon=True).start()
        while True:
            connection, _ = listener.accept()
            _, control, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(12))
            handles = array.array("i", control[0][2][:12])
            text = b""
            while not text.endswith(b"\n"):
                text += connection.recv(1 << 16)
            pid = os.fork()
            if not pid:
                _become(handles, *json.loads(text))
            connection.sendall(f"{pid}\n".encode())
            children[pid] = connection
            for handle in handles:
                os.close(handle)


def _reap(children: dict[int, socket.socket]) -> None:
    import time

    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.01)
            continue
        while pid not in children:
            time.sleep(0.001)
        with children.pop(pid) as connection:
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(handles: array.array, environment: dict[str, str], words: list[str], directory: str) -> None:
    for target, handle in enumerate(handles):
        os.dup2(handle, target)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    from mpi4py import MPI

    MPI.Init_thread()
    code = 1
    try:
        importlib.import_module(words[0]).main(words[1:])
    except SystemExit as ended:
        code = ended.code
        MPI.Finalize()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
