"""SLURM over the first pretend nodes: the controller on head, a daemon on each of them.

with Nodes(3) as nodes, SlurmNodes(nodes, 2) as slurm:
    slurm.run(["srun", "-N", "2", "hostname"])
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from limits import LIMIT
from pretend import PATH, Nodes, wait_until
from slurm_settings import COMMON, INSTALL, pmix_missing

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
# TmpFS: files are shared, but what PMIx keeps there belongs to one node.
CONF = (
    COMMON
    + """\
ClusterName=pretend
SlurmctldHost=head(10.78.0.254)
SlurmctldPort=17002
SlurmdPort=17003
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
TmpFS={root}/tmp.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
PartitionName=normal Nodes=ALL Default=YES DefaultTime=10
"""
)


def missing() -> str:
    """Why there is no SLURM here; empty if there is."""
    if absent := [name for name in PROGRAMS if not shutil.which(name, path=PATH)]:
        return f"no {' and '.join(absent)}: {INSTALL}"
    return pmix_missing()


class SlurmNodes:
    def __init__(self, nodes: Nodes, count: int) -> None:
        self.nodes, self.names, self.root = nodes, nodes.names[:count], nodes.folder / "slurm"
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {"PATH": PATH, "HOME": str(nodes.folder), "SLURM_CONF": str(self.root / "slurm.conf")}

    def __enter__(self) -> SlurmNodes:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        for name in ("state", *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in self.names)):
            (self.root / name).mkdir(parents=True)
        for folder in (self.nodes.folder, self.root):
            folder.chmod(0o755)  # munged refuses a socket that others cannot reach
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        each = [f"NodeName={name} NodeAddr=10.78.0.{i} CPUs=8 State=UNKNOWN\n" for i, name in enumerate(self.names, 1)]
        (self.root / "slurm.conf").write_text(CONF.format(root=self.root) + "".join(each))
        files = [f"--{name}-file={self.root}/munge.{name}" for name in ("key", "pid", "seed", "log")]
        # One for all nodes: its socket is a file.
        self._daemon("head", "munged", "--foreground", "--num-threads=2", f"--socket={self.root}/munge.socket", *files)
        wait_until((self.root / "munge.socket").exists, LIMIT, self.logs)
        self._daemon("head", "slurmctld", "-D", "-c")
        for name in self.names:
            self._daemon(name, "slurmd", "-D", "-N", name, namespaces=("-m", "-u", "-i", "-n", "-p"))
        wait_until(self._idle, LIMIT, self.logs)

    def _daemon(self, node: str, *command: str, namespaces: Sequence[str] = ("-m", "-u", "-i", "-n")) -> None:
        pid = (self.nodes.folder / node / "pid").read_text()
        line = ["nsenter", "-t", pid, *namespaces, "setpriv", "--pdeathsig", "KILL", *command]
        with (self.root / f"{command[0]}.{node}.out").open("wb") as output:
            self.daemons.append(
                subprocess.Popen(
                    line, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.root
                )
            )

    def _idle(self) -> bool:
        done = self.run(["sinfo", "-h", "-t", "idle", "-o", "%D"])
        return done.stdout.strip() == str(len(self.names))

    def logs(self) -> str:
        files = [*self.root.glob("*.log"), *self.root.glob("*.out")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in files)

    def run(
        self, command: Sequence[object], env: Mapping[str, str] | None = None, timeout: float = LIMIT
    ) -> subprocess.CompletedProcess[str]:
        """A client's command on head."""
        return self.nodes.start(command, (), {**self.environment, **(env or {})}).finish(timeout)

    def __exit__(self, *_: object) -> None:
        if len(self.daemons) > 2:
            self.run(["scancel", "--user=root"])
        for daemon in reversed(self.daemons):
            daemon.kill()  # nsenter, and with it the daemon
            daemon.wait()
