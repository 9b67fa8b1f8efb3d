"""How jobs end, without a SLURM: its commands are stand-ins here, so that many ends can be tried at once."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from limits import LIMIT
from repository import ROOT

# It stops at TERM with status 75, as a run does after its checkpoint; os.write, as print is not for handlers.
RANK = """\
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
os.write(1, b"started\\n")
time.sleep(60)
"""
JOB = """\
set -euo pipefail
. "$1/jobs/supervise.sh"
supervise bash "$1/jobs/launch.sh" pmix "${@:2}"
"""
COMMANDS = {
    "srun": 'while [[ $1 = -* ]]; do shift; done; exec "$@"',
    "scontrol": "echo JobState=RUNNING",
    "scancel": "true",
}


@pytest.fixture
def start(tmp_path: Path):
    """Starts a supervised job of one rank in a session of its own."""
    for name, body in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    jobs: list[subprocess.Popen[str]] = []

    def begin(number: int, program: str = RANK) -> subprocess.Popen[str]:
        settings = {"SLURM_JOB_ID": str(number), "FEDLADA_LOGS": str(tmp_path), "FEDLADA_MAX_FAILURES": "3"}
        command = ["bash", "-c", JOB, "job", str(ROOT), sys.executable, "-S", "-c", program]
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | settings | {"PATH": path}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        job = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
        jobs.append(job)
        return job

    yield begin
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def until(job: subprocess.Popen[str], word: str) -> str:
    """What the job prints, to the line with ``word``."""
    text = ""
    for line in job.stdout:
        text += line
        if word in line:
            return text
    return text


def test_a_status_is_never_lost_to_a_signal(start):
    """Bash forgets how a process ended if that happens while a trap ends a `wait`; the job would count a failure."""
    jobs = [start(number) for number in range(24)]
    for job in jobs:
        until(job, "started")
        os.killpg(job.pid, signal.SIGTERM)
    for job in jobs:
        assert "stopped with a checkpoint: requeued" in until(job, "queued")


@pytest.mark.parametrize(("status", "words"), [(2, "bad input"), (3, "diverged")])
def test_what_would_fail_again_is_not_requeued(status, words, start):
    job = start(100 + status, f"raise SystemExit({status})")
    assert f"{words}, see above: not requeued" in until(job, "requeued")
    assert job.wait(timeout=LIMIT) == status


KIND = """\
set -euo pipefail
. "$FEDLADA_HOME/jobs/env.sh"
prepare_ranks
echo "$MPI_KIND $LAUNCH_KIND ${OMPI_ALLOW_RUN_AS_ROOT-}"
"""


@pytest.mark.parametrize(
    ("chosen", "library", "version", "nodes", "kinds"),
    [
        ("auto", "Open MPI", "5.0.11", 1, "pmix ulfm 1"),
        ("auto", "Open MPI", "5.0.11", 3, "pmix pmix "),
        ("ulfm", "Open MPI", "5.0.11", 3, "pmix ulfm 1"),
        ("ulfm", "Open MPI", "4.1.6", 1, None),
        ("ulfm", "MPICH", "4.2.2", 1, None),
        ("auto", "Open MPI", "4.1.6", 1, "pmix pmix "),
        ("auto", "Open MPI", "5.0.10", 1, "pmix pmix "),  # not the one of mpirun
        ("auto", "MPICH", "4.2.2", 1, "pmi2 pmi2 "),
        ("pmix", "Open MPI", "5.0.11", 1, "pmix pmix "),
        ("cray_shasta", "Cray MPICH", "8.1.0", 2, "cray_shasta cray_shasta "),
    ],
)
def test_how_jobs_start_ranks(chosen, library, version, nodes, kinds, tmp_path):
    mpirun = "4.1.6" if version == "4.1.6" else "5.0.11"
    commands = {"python": f"echo {library} {version}", "mpirun": f"echo 'mpirun (Open MPI) {mpirun}'"}
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    hidden = ("SLURM_", "FEDLADA_", "OMPI_", "PRTE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"FEDLADA_HOME": str(ROOT), "FEDLADA_LOGS": str(tmp_path), "FEDLADA_MPI": chosen}
    environment |= {"SLURM_JOB_NUM_NODES": str(nodes), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["FEDLADA_VENV"] = str(tmp_path / "venv")
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "python").rename(tmp_path / "venv/bin/python")
    done = subprocess.run(["bash", "-c", KIND], env=environment, capture_output=True, text=True, timeout=LIMIT)
    if kinds:
        assert (done.returncode, done.stdout) == (0, f"{kinds}\n"), done.stderr
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: FEDLADA_MPI=ulfm needs Open MPI 5")


def test_the_launcher_of_a_grid_is_read_as_it_was_written(tmp_path):
    """Also where the locale does not have the characters of the folder."""
    home = tmp_path / "jörg's clone"
    home.symlink_to(ROOT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FEDLADA_"))}
    environment |= {"FEDLADA_HOME": str(home), "FEDLADA_LOGS": str(tmp_path), "FEDLADA_VENV": sys.prefix, "LC_ALL": "C"}
    script = '. "$FEDLADA_HOME/jobs/env.sh"; LAUNCH_KIND=pmix; launcher'
    done = subprocess.run(["bash", "-euc", script], env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert shlex.split(done.stdout) == ["bash", f"{home}/jobs/launch.sh", "pmix"], done.stderr


@pytest.mark.parametrize(
    ("script", "given", "todo", "program"),
    [
        ("submit-tune.sh", ["--limit=2", "--out=my runs"], "0 0-1", "<x><--out><my runs><--stage><0>"),
        ("submit-grid.sh", ["--limit=2", "--runs=my runs", "--set=lr=1"], "0-1", "<x><--runs><my runs><--set><lr=1>"),
    ],
)
def test_values_may_be_joined_to_the_options_of_a_script(script, given, todo, program, tmp_path):
    """To sbatch, --out=DIR would be its --output."""
    log = tmp_path / "log"
    commands = {
        "venv/bin/python": f"echo {todo}",
        "sbatch": f"""printf '<%s>' "$@" >>'{log}'; echo >>'{log}'; echo 7""",
    }
    (tmp_path / "venv/bin").mkdir(parents=True)
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FEDLADA_"))}
    environment |= {"FEDLADA_LOGS": str(tmp_path), "FEDLADA_GPUS_PER_NODE": "0", "FEDLADA_VENV": str(tmp_path / "venv")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    command = ["bash", str(ROOT / "jobs" / script), "x", *given, "--time=5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    array = log.read_text().splitlines()[0]
    assert "<--array=0-1%2>" in array
    assert array.endswith(program)
    assert array.count("<--time=5>") == 1
    assert "<--out=" not in array
