"""Pretend nodes on one machine: host names, networks, processes and shared memory of their own, files in common.

    with Nodes(2) as nodes:
        nodes.run([mpirun, "-n", "4", nodes.python(2), "script.py"], slots=[3, 1])
        nodes.slow("n2", "100mbit")
        nodes.cut("n2")

Every node is a few Linux namespaces that a process of its own keeps; a bridge in those of ``head``, where mpirun runs,
connects them. mpirun reaches a node by a script in place of ssh, which passes on as little of the environment. All
processes of a node end with its keeper, and the keepers with this process. Ranks are forked (``fork_server``): one
server has imported torch, and a process of it in every node is the server there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import fork_server
from limits import LIMIT

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv")
INSTALL = "apt-get install --no-install-recommends util-linux iproute2"
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
KEEPER = """
set -e
hostname "$1"
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/$1/boot_id" /proc/sys/kernel/random/boot_id
ip link set lo up
: >"$2/$1/ready"
while :; do sleep 3600 & wait $!; done
"""
# Of a remote shell: mpirun's options for ssh, the host, then the command.
AGENT = """#!/bin/bash
while [ "${{1#-}}" != "$1" ]; do shift; done
node=$1; shift
exec nsenter -t "$(cat {folder}/$node/pid)" -m -u -i -n -p setpriv --pdeathsig KILL {account} env -i \\
    HOME={folder}/$node PATH=/usr/bin:/bin TMPDIR={folder}/$node XDG_CACHE_HOME={folder}/$node bash -c "cd /; $*"
"""
FIRST_ACCOUNT = 12000  # plus the number of the node
ACCOUNT = f"--reuid $(({FIRST_ACCOUNT} + ${{node#n}})) --regid $(({FIRST_ACCOUNT} + ${{node#n}})) --clear-groups"
FORKED = Path(fork_server.__file__).name  # in the commands of servers and of what they fork
# A server on the node of process argv[1]; the last namespaces are those through which it sees the others' files.
SERVER = """
import ctypes, os, platform, runpy, sys
platform._uname_cache = None  # of the host's name
keeper, server, folder = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
for handle in [os.open(f"/proc/{keeper}/ns/{kind}", os.O_RDONLY) for kind in ("ipc", "uts", "net", "pid", "mnt")]:
    if libc.setns(handle, 0):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(handle)
if child := os.fork():  # which alone is in the new namespace of processes
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
sys.argv = [server, folder, str(os.dup(1))]
runpy.run_path(server, run_name="__main__")
"""


def missing() -> str:
    """Why there can be no pretend nodes here; empty if there can."""
    if os.geteuid() != 0:
        return "pretend nodes need root"
    if absent := [name for name in PROGRAMS if not shutil.which(name, path=PATH)]:
        return f"pretend nodes need {' and '.join(absent)}: {INSTALL}"
    trial = "unshare --net --uts --ipc --mount --pid --fork --mount-proc ip link add p0 type veth peer name p1"
    tried = subprocess.run(trial.split(), env={**os.environ, "PATH": PATH}, capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"this machine makes no pretend nodes: {tried.stderr.strip()}"


class Nodes:
    def __init__(self, count: int, accounts: bool = False) -> None:
        """``accounts``: what is started on a node runs as an account of the node's own, which root is on none."""
        self.accounts = accounts
        self.names = [f"n{i}" for i in range(1, count + 1)]
        # A short path: it is part of the names of sockets.
        self.folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
        self.keepers: dict[str, subprocess.Popen[bytes]] = {}
        self.server: fork_server.ForkServer | None = None
        self.servers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Nodes:
        try:
            addresses = {"localhost": "127.0.0.1", "head": "10.78.0.254"}
            addresses |= {name: f"10.78.0.{i}" for i, name in enumerate(self.names, 1)}
            (self.folder / "hosts").write_text("".join(f"{where} {name}\n" for name, where in addresses.items()))
            agent = self.folder / "agent"
            agent.write_text(AGENT.format(folder=self.folder, account=ACCOUNT if self.accounts else ""))
            agent.chmod(0o755)
            self._boot("head", namespaces=("--net", "--uts", "--ipc", "--mount"))
            self._ip("head", "link add eth0 type bridge")
            self._ip("head", "addr add 10.78.0.254/24 dev eth0")
            self._ip("head", "link set eth0 up")
            for name in self.names:
                self._boot(name)
                if self.accounts:
                    os.chown(self.folder / name, FIRST_ACCOUNT + int(name[1:]), FIRST_ACCOUNT + int(name[1:]))
                    (self.folder / name).chmod(0o700)
                pid = (self.folder / name / "pid").read_text()
                self._ip("head", f"link add {name} type veth peer name eth0 netns {pid}")
                self._ip("head", f"link set {name} master eth0 up")
                self._ip(name, f"addr add {addresses[name]}/24 dev eth0")
                self._ip(name, "link set eth0 up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.keepers.values(), *self.servers.values()):
            process.kill()
            process.wait()
        if self.server:
            self.server.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def python(self, count: int) -> str:
        """An interpreter for ranks on the first nodes; elsewhere, or with settings of threads, a process is a new one.

        Like all that the agent starts, the server has none of this process's variables.
        """
        if not self.server:
            self.server = fork_server.ForkServer(environment={"PATH": "/usr/bin:/bin"})
        for name in self.names[:count]:
            if name not in self.servers:
                keeper = (self.folder / name / "pid").read_text()
                words = [self.server.python, "-c", SERVER, keeper, fork_server.__file__, str(self.server.folder)]
                self.servers[name] = server = subprocess.Popen(
                    words, env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                assert server.stdout
                assert server.stdout.read(1), f"no server on {name}"
        return self.server.python

    def _boot(self, name: str, namespaces: Sequence[str] = ("--net", "--uts", "--ipc", "--mount", "--pid")) -> None:
        folder = self.folder / name
        folder.mkdir()
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        own_processes = ("--mount-proc", "--fork", "--kill-child") if "--pid" in namespaces else ()
        command = ("setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, *own_processes)
        with (folder / "log").open("w") as log:
            self.keepers[name] = keeper = subprocess.Popen(
                [*command, "bash", "-c", KEEPER, "keeper", name, self.folder],
                env={**os.environ, "PATH": PATH}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until((folder / "ready").exists, LIMIT, lambda: f"{name} did not start: {(folder / 'log').read_text()}")
        inside = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
        (folder / "pid").write_text(inside[0] if own_processes else str(keeper.pid))

    def _ip(self, name: str, words: str) -> None:
        self.on(name, "ip", *words.split(), namespaces=("-n",))

    def on(self, name: str, *command: object, namespaces: Sequence[str] = ("-m", "-u", "-i", "-n")) -> str:
        """What a command prints on a node, or on head."""
        pid = (self.folder / name / "pid").read_text()
        words = ["nsenter", "-t", pid, *namespaces, *map(str, command)]
        done = subprocess.run(words, env={**os.environ, "PATH": PATH}, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def cut(self, name: str) -> None:
        """Pull the node's cable: nobody is told."""
        self._ip("head", f"link set {name} down")

    def join(self, name: str) -> None:
        self._ip("head", f"link set {name} up")

    def lose(self, name: str, told: bool) -> None:
        """End all that runs on the node; ``told``: its connections are closed, as those of killed processes are."""
        if not told:
            self.cut(name)
        self.keepers[name].kill()
        self.keepers[name].wait()

    def slow(self, name: str, rate: str) -> None:
        """Limit the node's cable, both ways, such as to 100mbit; "" for no limit."""
        for where, device in (("head", name), (name, "eth0")):
            limit = ("replace", "dev", device, "root", "tbf", "rate", rate, "burst", "256k", "latency", "200ms")
            words = limit if rate else ("del", "dev", device, "root")
            self.on(where, "tc", "qdisc", *words, namespaces=("-n",))

    def as_account(self, name: str, *command: object) -> subprocess.CompletedProcess[str]:
        """What a command does on a node, as mpirun would start it there."""
        words = [self.folder / "agent", name, shlex.join(map(str, command))]
        return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, env={"PATH": PATH})

    def hide(self, name: str, folder: Path) -> None:
        """The node sees an empty folder in its place."""
        self.on(name, "mount", "-t", "tmpfs", "tmpfs", folder)

    def processes(self, name: str) -> list[str]:
        """The commands that run on a node, but for its keeper and the server of its ranks.

        A forked rank is there twice: by the command that asked for it, and by that of the server.
        """
        namespace = os.readlink(f"/proc/{(self.folder / name / 'pid').read_text()}/ns/pid")
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(process / "ns/pid") == namespace:
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        if name in self.servers:
            found.remove(next(line for line in found if FORKED in line))
        return [line for line in found if line and "keeper" not in line and not line.startswith("sleep 3600")]

    def start(self, command: Sequence[object], slots: Sequence[int], env: Mapping[str, str] | None = None) -> Started:
        """Start mpirun on head, with that many slots on the nodes; the environment is ``env`` and the path.

        It must start a program with MPI: Open MPI 5.0's mpirun can miss the end of very short processes, and waits.
        """
        name = uuid.uuid4().hex[:6]
        hosts = self.folder / f"hostfile-{name}"
        hosts.write_text("".join(f"{name} slots={n}\n" for name, n in zip(self.names, slots, strict=False) if n))
        settings = {
            "PATH": PATH,
            "HOME": str(self.folder / "head"),
            "TMPDIR": str(self.folder / "head"),
            "PRTE_MCA_plm_ssh_agent": str(self.folder / "agent"),
            "PRTE_MCA_prte_default_hostfile": str(hosts),
        }
        pid = (self.folder / "head" / "pid").read_text()
        words = ["nsenter", "-t", pid, "-m", "-u", "-i", "-n", *map(str, command)]
        return Started(words, {**settings, **(env or {})}, self.folder / name)

    def run(
        self,
        command: Sequence[object],
        slots: Sequence[int],
        env: Mapping[str, str] | None = None,
        timeout: float = LIMIT,
    ) -> subprocess.CompletedProcess[str]:
        return self.start(command, slots, env).finish(timeout)


class Started:
    """A command that runs. What it prints goes to files: processes that it leaves behind would keep a pipe open."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], prefix: Path) -> None:
        self.words, self.out, self.err = words, prefix.with_suffix(".out"), prefix.with_suffix(".err")
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    def finish(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """How it ended, and what it printed; it is ended by force after ``timeout``, which raises."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            printed = f"{self.out.read_text()[-3000:]}\n{self.err.read_text()[-3000:]}"
            raise AssertionError(f"not finished after {timeout} s: {self.words}\n{printed}") from None
        return subprocess.CompletedProcess(
            self.words, self.process.returncode, self.out.read_text(), self.err.read_text()
        )

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def wait_until(condition, seconds: float, explain) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)
