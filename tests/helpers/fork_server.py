"""A Python that starts in a fraction of a second: forked from a process that has imported torch and the like.

    with ForkServer() as server:
        subprocess.run([server.python, "-m", "fedlada_mpi.run", "--rounds", "2"])
        subprocess.run([mpirun, "-n", "4", server.python, "script.py"])

``server.python`` is a program that asks the server for a process with its own arguments, environment, directory, files,
limits and ignored signals, passes on signals, and ends as that process does. MPI is not started before the fork, and
modules of the package that were imported are dropped where the process would find another copy of it. What only a new
interpreter can do (other options than -m and -c, other variables that are read when torch is loaded, another user or
namespace) it leaves to one: it then is the real Python.
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from contextlib import suppress
from pathlib import Path

# Read when an interpreter starts or torch is loaded; a process that has others needs an interpreter of its own. Triton
# and TorchInductor, which sets a variable itself where a test uses it, are loaded after the fork.
SENSITIVE = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "TORCH_", "CUDA", "ATEN_", "ONEDNN_")
# LD_LIBRARY_PATH is set by mpirun, OMP_WAIT_POLICY by the package; CUDA_VISIBLE_DEVICES is read at the first use of a
# GPU, and the server makes none.
HANDLED = (
    "PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED",
    "LD_LIBRARY_PATH", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
PRELOADED = (
    "numpy", "numpy.ma", "numpy.random", "torch", "torch.fx", "torch.func", "torch.nested", "h5py", "mpi4py", "tqdm",
    "PIL.Image", "PIL.ImageOps", "multiprocessing.spawn", "multiprocessing.queues", "multiprocessing.synchronize",
    "concurrent.futures.thread", "concurrent.futures.process", "importlib.metadata", "json", "platform", "tomllib",
    "matplotlib.figure", "matplotlib.backends.backend_agg",
)  # fmt: skip

CLIENT = """#!{real} -IS
import array, json, os, resource, signal, socket, sys

REAL, FOLDER, SENSITIVE, HANDLED = {real!r}, {folder!r}, {sensitive!r}, {handled!r}
words = sys.argv[1:]

def place():
    return "-".join(str(os.stat("/proc/self/ns/" + kind).st_ino) for kind in ("mnt", "pid", "net"))

def sensitive(environment):
    return {{n: v for n, v in environment.items() if n.startswith(SENSITIVE) and n not in HANDLED}}

def ask():
    if not words or (words[0].startswith("-") and (words[0] not in ("-m", "-c") or len(words) < 2)):
        return None
    if words[0] == "-c" and "os.exec" in words[1]:  # its caller, such as SLURM, must have the other program as a child
        return None
    if words[0] in ("-m", "-c") and any(name in words[1] for name in ("loky", "multiprocessing")):  # has open files
        return None
    path = os.path.join(FOLDER, place())
    try:
        with open(path + ".json") as file:
            known = json.load(file)
        if known != [os.getuid(), sensitive(os.environ)]:
            return None
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
    except OSError:
        return None
    return connection

connection = ask()
if connection is None:
    os.execv(REAL, [REAL, *words])
files = []
for number in range(3):
    try:
        os.fstat(number)
        files.append(number)
    except OSError:
        files.append(os.open(os.devnull, os.O_RDWR))
numbers = [n for n in signal.valid_signals() if n not in (9, 19, 32, 33)]
by_python = (signal.SIGPIPE, signal.SIGXFSZ)
ignored = [int(n) for n in numbers if signal.getsignal(n) == signal.SIG_IGN and n not in by_python]
limits = [[kind, resource.getrlimit(kind)] for kind in range(16)]
umask = os.umask(0)
os.umask(umask)
blocked = [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, numbers)]
connection.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
request = dict(words=words, environment=dict(os.environ), directory=os.getcwd(), ignored=ignored, blocked=blocked,
               limits=limits, umask=umask)
connection.sendall(json.dumps(request).encode() + b"\\n")
answer = connection.makefile()
pid = int(answer.readline())
for number in numbers:
    if number not in (signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH):
        signal.signal(number, lambda n, _: os.kill(pid, n))
signal.pthread_sigmask(signal.SIG_SETMASK, [])
code = int(answer.readline() or -9)
if code < 0:
    if -code not in (9, 19):
        signal.signal(-code, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class ForkServer:
    """A process of its own, so that its user may have started MPI or threads; it ends with its user."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fork-", dir="/tmp"))
        self.python = str(self.folder / "bin" / "python")
        self._write()
        ready, told = os.pipe()
        os.set_inheritable(told, True)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder), str(told)],
            env=environment, stdin=subprocess.PIPE, pass_fds=[told], start_new_session=True,
        )  # fmt: skip
        os.close(told)
        with os.fdopen(ready, "rb") as file:
            if not file.read(1):
                raise RuntimeError("the fork server did not start")

    def _write(self) -> None:
        """``bin`` looks like that of a virtual environment."""
        (self.folder / "bin").mkdir()
        self.folder.chmod(0o755)
        client = CLIENT.format(real=sys.executable, folder=str(self.folder), sensitive=SENSITIVE, handled=HANDLED)
        programs = {"python": client}
        for path in Path(sys.executable).parent.glob("fedlada-*"):
            programs[path.name] = f'#!/bin/sh\nexec {self.python} {path} "$@"\n'
        if mpirun := shutil.which("mpirun", path=str(Path(sys.executable).parent)):
            programs["mpirun"] = f'#!/bin/sh\nexec {mpirun} "$@"\n'
        for name, text in programs.items():
            path = self.folder / "bin" / name
            path.write_text(text)
            path.chmod(0o755)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def place() -> str:
    """This process's namespaces: processes of other ones have a server of their own."""
    return "-".join(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("mnt", "pid", "net"))


def serve(folder: str, ready: int) -> dict:
    """Fork a process for every client; returns in each of them, with what it is asked to be."""
    path = os.path.join(folder, place())
    known = {n: v for n, v in os.environ.items() if n.startswith(SENSITIVE) and n not in HANDLED}
    with open(path + ".json", "w") as file:
        json.dump([os.getuid(), known], file)
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    watched = selectors.DefaultSelector()
    for source in (listener, wake, 0):  # standard input ends with the server's user
        watched.register(source, selectors.EVENT_READ)
    children: dict[int, socket.socket] = {}
    os.write(ready, b"r")
    os.close(ready)
    while True:
        for key, _ in watched.select():
            source = key.fileobj
            if source == 0:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(0)
            elif source is listener:
                connection, _ = listener.accept()
                if request := _read(connection):
                    pid = os.fork()
                    if not pid:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        # Now: the selector is part of a cycle, and the collector would later close files of the process
                        # that have the same numbers.
                        for other in (listener, wake, woken, connection, *children.values()):
                            other.close()
                        watched.close()
                        return request
                    for handle in request["files"]:
                        os.close(handle)
                    children[pid] = connection
                    watched.register(connection, selectors.EVENT_READ, pid)
                    with suppress(OSError):
                        connection.sendall(f"{pid}\n".encode())
            elif source is wake:
                wake.recv(4096)
                _reap(children, watched)
            elif key.data in children:  # the client was killed
                watched.unregister(source)
                os.kill(key.data, signal.SIGKILL)


def _read(connection: socket.socket) -> dict | None:
    try:
        _, control, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(12))
        text = b""
        while not text.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part:
                return None
            text += part
        return {**json.loads(text), "files": array.array("i", control[0][2][:12])}
    except (OSError, IndexError):
        return None


def _reap(children: dict[int, socket.socket], watched: selectors.BaseSelector) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        connection = children.pop(pid)
        with suppress(KeyError):
            watched.unregister(connection)
        with suppress(OSError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        connection.close()


def become(request: dict, python: str) -> None:
    """Take over everything in which the client differs."""
    import resource

    for target, handle in enumerate(request["files"]):
        os.dup2(handle, target)
    os.closerange(3, 4096)
    os.umask(request["umask"])
    os.chdir(request["directory"])
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for kind, limit in request["limits"]:
        if resource.getrlimit(kind) != tuple(limit):
            resource.setrlimit(kind, limit)
    if environment.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable()
    buffered = not environment.get("PYTHONUNBUFFERED")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
        if number:
            lines = name == "stderr" or stream.isatty()
            stream.reconfigure(line_buffering=lines, write_through=not buffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.executable = python
    sys.path[:] = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path[1:]]
    sys.path[:] = [entry for entry in sys.path if entry]


def import_the_package() -> None:
    """As much of it as the process that a grid forks its runs from."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for name in importlib.import_module("fedlada_mpi.experiments.warm").IMPORTED:
        importlib.import_module(name)
    del sys.path[0]


def drop_another_copy() -> None:
    """Of the package, unless it is the one that this process would import."""
    mine = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "fedlada_mpi"}
    found = importlib.util.find_spec("fedlada_mpi")
    if found and found.origin and os.path.samefile(found.origin, mine["fedlada_mpi"].__file__):
        sys.modules.update(mine)
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # which the import would do


def execute(words: list[str]) -> None:
    """What the interpreter does with its arguments."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    beside = os.path.dirname(os.path.realpath(words[0]))
    sys.path.insert(0, {"-m": os.getcwd(), "-c": ""}.get(words[0], beside))
    drop_another_copy()
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = list(words)
        main.__file__ = words[0]
        with open(words[0], "rb") as file:
            exec(compile(file.read(), words[0], "exec"), main.__dict__)


def ending(words: list[str]) -> tuple[int, int]:
    """Execute a program as the interpreter does: its exit status, and the signal that it ends itself by, or 0."""
    try:
        execute(words)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0, 0
        print(ended.code, file=sys.stderr)
        return 1, 0
    except BaseException as error:
        # Its own frames come after those of this file.
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1, signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
    return 0, 0


def leave(status: int, by: int) -> None:
    """End as the interpreter does, but for taking apart everything in memory, which costs a second with torch."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if by:
        signal.signal(by, signal.SIG_DFL)
        os.kill(os.getpid(), by)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    import_the_package()  # first, as it chooses how the threads of torch wait
    for _name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(_name)
    for _finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        _finalizer.atexit = False  # torch would take its 150 libraries apart at the end of every child
    gc.collect()
    gc.freeze()  # children would otherwise copy all that was imported when they first collect
    server = sys.modules["__main__"]  # kept: another takes its place
    _folder = sys.argv[1]
    _request = serve(_folder, int(sys.argv[2]))
    become(_request, os.path.join(_folder, "bin", "python"))
    leave(*ending(_request["words"]))
