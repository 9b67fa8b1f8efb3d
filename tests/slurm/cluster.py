"""A throw-away SLURM cluster of one node: started in about a second, without systemd, cgroups or accounting.

    with Cluster() as cluster:
        cluster.run("srun", "-n", "3", "hostname")

Everything is in one temporary folder; /etc/slurm and /etc/munge are not touched, and all ports are
bound to 127.0.0.1. The daemons are children of this process and die with it.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from limits import LIMIT
from slurm_settings import COMMON, INSTALL, pmix_missing

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
# The jobs' own resume logic is under test, so SLURM must be quick: cred_expire is also the delay of a requeue
# (120 s by default and for values below 5). FirstJobId and TmpFS: what a killed job has left in /dev/shm and for PMIx
# would be in the way of one that bears the same number.
CONF = (
    COMMON
    + """\
ClusterName=throwaway
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
TmpFS={root}/tmp
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.log
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
KillWait=100
MinJobAge=3600
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE DefaultTime=10 PriorityTier=2
"""
)
END_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    absent = [program for program in PROGRAMS if not shutil.which(program)]
    if absent:
        return f"no {', '.join(absent)}: {INSTALL}"
    if reason := pmix_missing():
        return reason
    if os.geteuid() != 0:
        return "a throw-away SLURM cluster needs root"
    host = node_name()
    try:
        socket.gethostbyname(host)
    except OSError:
        return f"the host name does not resolve: echo 127.0.0.1 {host} >> /etc/hosts"
    return None


def node_name() -> str:
    """The node bears the machine's own name: by another, ranks of Open MPI 5 do not find their node's data."""
    return socket.gethostname().split(".")[0]


def wait_for(condition: Callable[[], object], what: str, seconds: float, interval: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(interval)


def free_ports(count: int) -> list[int]:
    holders = [socket.socket() for _ in range(count)]
    try:
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        return [holder.getsockname()[1] for holder in holders]
    finally:
        for holder in holders:
            holder.close()


class Cluster:
    def __init__(self, cpus: int = 48) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.cpus = cpus
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(self.root / "slurm.conf"),
        }

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException as error:
            logs = self.logs()
            self.stop()
            raise RuntimeError(f"the SLURM cluster did not start: {error}\n{logs}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.root.chmod(0o755)  # munged refuses a socket that others cannot reach
        for name in ("state", "spool", "log", "tmp"):
            (self.root / name).mkdir()
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        controller_port, node_port = free_ports(2)
        conf = Path(self.environment["SLURM_CONF"])
        conf.write_text(
            CONF.format(
                root=self.root, host=node_name(), controller_port=controller_port, node_port=node_port,
                first_job=random.randrange(1000, 60000), cpus=self.cpus,
                memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
            )
        )  # fmt: skip
        files = {name: f"--{name}-file={self.root}/munge.{name}" for name in ("key", "pid", "seed")}
        munge_socket = self.root / "munge.socket"
        self._daemon("munged", "--foreground", f"--socket={munge_socket}", f"--log-file={self.root}/log/munged.log",
                     "--num-threads=2", *files.values())  # fmt: skip
        wait_for(munge_socket.exists, "munged's socket", 60)
        self._daemon("slurmctld", "-D", "-c", "-f", str(conf))
        self._daemon("slurmd", "-D", "-N", node_name(), "-f", str(conf))
        wait_for(self._idle, "an idle node", 100)

    def _daemon(self, *command: str) -> None:
        with (self.root / "log" / f"{command[0]}.out").open("wb") as output:
            line = ["setpriv", "--pdeathsig", "TERM", *command]
            self.daemons.append(
                subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment, cwd=self.root
                )
            )

    def _idle(self) -> bool:
        for daemon in self.daemons:
            if daemon.poll() is not None:
                raise RuntimeError(f"{daemon.args[3]} ended with status {daemon.returncode}")
        return self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).stdout.strip() == "1"

    def stop(self) -> None:
        """Jobs first, whose processes would outlive slurmd, then the daemons, then the folder."""
        try:
            if len(self.daemons) == 3 and all(daemon.poll() is None for daemon in self.daemons):
                for options in (("--full", "--signal=KILL"), ()):
                    self.run("scancel", *options, "--user=root", check=False)
                wait_for(lambda: not self.run("squeue", "-h", check=False).stdout.strip(), "the end of all jobs", 100)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            print(f"jobs may be left behind: {error}", file=sys.stderr)
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
            for daemon in self.daemons:
                try:
                    daemon.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
            for process in self._descendants():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            shutil.rmtree(self.root, ignore_errors=True)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.root.glob("log/*")))

    def run(
        self, *command: object, check: bool = True, timeout: float = LIMIT, env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """A client's command on this cluster."""
        line = [str(word) for word in command]
        done = subprocess.run(
            line, env={**self.environment, **(env or {})}, cwd=cwd or self.root, text=True, capture_output=True,
            stdin=subprocess.DEVNULL, timeout=timeout,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"status {done.returncode}: {' '.join(line)}\n{done.stdout}\n{done.stderr}")
        return done

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`, such as JobState, ExitCode and Restarts."""
        text = self.run("scontrol", "--oneliner", "show", "job", job).stdout.splitlines()[0]
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, job: str, seconds: float = 150) -> dict[str, str]:
        """The fields of a job once it has ended for good."""
        fields: dict[str, str] = {}

        def ended() -> bool:
            fields.clear()
            fields.update(self.job(job))
            return fields["JobState"] in END_STATES and self.run("squeue", "-h", "-j", job, check=False).stdout == ""

        try:
            wait_for(ended, f"the end of job {job}", seconds, interval=0.25)
        except TimeoutError as error:
            output = Path(fields.get("StdOut", "none"))
            text = output.read_text()[-3000:] if output.is_file() else "(no output)"
            raise AssertionError(f"{error}\n{fields}\n{text}") from error
        return fields

    def processes(self, job: str, rank: int, number: str = "SLURM_PROCID") -> list[int]:
        """The Python processes of one rank of a job's step; ``number``: the variable by which it knows its rank."""
        wanted = {f"SLURM_JOB_ID={job}", f"{number}={rank}"}
        return [process for process, words in self._descendants().items() if wanted <= words and _is_python(process)]

    def _descendants(self) -> dict[int, set[str]]:
        """All processes that this cluster has started, with their environment; its configuration file marks them."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = set((entry / "environ").read_text(errors="replace").split("\0"))
                if f"SLURM_CONF={self.root}/slurm.conf" in words:
                    found[int(entry.name)] = words
        return found


def _is_python(process: int) -> bool:
    try:
        return "python" in Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")[0]
    except OSError:
        return False
