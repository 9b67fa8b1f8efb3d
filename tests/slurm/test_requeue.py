"""Jobs that are interrupted: signalled, killed, preempted, cancelled, or always failing."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from at_once import at_once
from cluster import wait_for
from ranks import tolerant_mpirun
from repository import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]
TRAIN = ("--participation", 0.1, "--local-epochs", 1, "--rounds", 30)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


def test_signalled_jobs_requeue_and_end_as_if_left_alone(user):
    """The ranks by mpirun, as jobs have them by default, are those of a user: each is a new interpreter."""
    jobs, forked = {}, user.environment["FEDLADA_VENV"]
    for name, kind, venv in (("by mpirun", "auto", sys.prefix), ("by srun", "pmix", forked), ("alone", "auto", forked)):
        user.environment |= {"FEDLADA_MPI": kind, "FEDLADA_VENV": venv}
        # So many rounds that none has ended when its signal comes.
        jobs[name] = user.submit("train", "--", *TRAIN, "--rounds", 150, "--out", name)
    for name in ("by srun", "by mpirun"):
        user.wait_for_round(name, 2, jobs[name])
        user.cluster.run("scancel", "--batch", "--signal=USR1", jobs[name])

    fields = user.cluster.wait(jobs["alone"])
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "0"), user.output(jobs["alone"])
    expected = parameters(user.folder / "alone")
    for name in ("by srun", "by mpirun"):
        fields = user.cluster.wait(jobs[name])
        output = user.output(jobs[name])
        assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("COMPLETED", "0:0", "1"), output
        assert output.count(f"ranks {name}: where one dies") == 2
        assert output.count("stopped with a checkpoint: requeued") == 1
        assert output.index("start 1") < output.index("requeued") < output.index("start 2"), "must be appended"
        found = parameters(user.folder / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        lines = (user.folder / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == list(range(1, 151))


@pytest.mark.slow
@at_once
def test_a_killed_rank_ends_the_step_of_srun_at_once_and_the_job_completes(user):
    user.environment["FEDLADA_MPI"] = "pmix"
    job = user.submit("train", "--", *TRAIN, "--checkpoint-every", 5, "--out", "run")
    user.wait_for_round("run", 6, job)
    (rank,) = user.cluster.processes(job, rank=1)
    os.kill(rank, signal.SIGKILL)
    # Survivors that SLURM has to kill would live for KillWait seconds, which are more.
    wait_for(lambda: "failure 1: requeued" in user.output(job), "the end of the step", 60)

    fields = user.cluster.wait(job)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("COMPLETED", "0:0", "1"), user.output(job)
    assert json.loads((user.folder / "run/summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
@at_once
def test_a_killed_rank_does_not_end_a_job_of_mpirun(user):
    tolerant_mpirun()
    user.environment["FEDLADA_RANKS"] = "3"
    job = user.submit("train", "--", *TRAIN, "--out", "run")
    user.wait_for_round("run", 3, job)
    (rank,) = user.cluster.processes(job, 1, "OMPI_COMM_WORLD_RANK")
    os.kill(rank, signal.SIGKILL)
    fields = user.cluster.wait(job)
    output = user.output(job)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("COMPLETED", "0:0", "0"), output
    assert "where one dies, the others go on" in output
    summary = json.loads((user.folder / "run/summary.json").read_text())
    assert (summary["status"], [lost["rank"] for lost in summary["left"]]) == ("finished", [1])


@pytest.mark.slow
@at_once
def test_bad_input_is_not_tried_again(user):
    job = user.submit("train", "--", "--algorithm", "fedsomething", "--out", "run")
    fields = user.cluster.wait(job)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "2:0", "0"), user.output(job)
    assert "bad input, see above: not requeued" in user.output(job)


# A command that needs no MPI: it waits in the job's first start, and stops at TERM and USR1 with status 75.
STAND_IN = """\
import os, signal, sys, time
def stop(*_):
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGUSR1, stop)
os.write(1, b"started\\n")
if sys.argv[1] == "fail":
    sys.exit(1)
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    time.sleep(60)
"""
JOB = """\
#!/usr/bin/env bash
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
. "$FEDLADA_HOME/jobs/env.sh"
. "$FEDLADA_HOME/jobs/supervise.sh"
prepare_ranks
supervise bash "$FEDLADA_HOME/jobs/launch.sh" "$LAUNCH_KIND" python stand_in.py "$@"
"""
KINDS = ("pmix", "auto")  # by srun, by mpirun


def submit_stand_in(user, argument: str, *options: str, kind: str = "pmix") -> str:
    (user.folder / "stand_in.py").write_text(STAND_IN)
    (user.folder / "job.sh").write_text(JOB)
    user.environment |= {"FEDLADA_HOME": str(ROOT), "FEDLADA_MPI": kind}
    return user.run("sbatch", "-o", "logs-%j.out", "-n", 2, *options, "job.sh", argument).stdout.split()[-1]


def stand_in_output(user, job: str) -> str:
    path = user.folder / f"logs-{job}.out"
    return path.read_text() if path.exists() else ""


def wait_for_stand_in(user, job: str) -> None:
    """Until both ranks handle signals."""
    wait_for(lambda: stand_in_output(user, job).count("started") == 2, "the start", 100)


@pytest.mark.slow
def test_preempted_job_uses_its_grace_time_and_comes_back(user):
    jobs = [submit_stand_in(user, "run", kind=kind) for kind in KINDS]
    for job in jobs:
        wait_for_stand_in(user, job)
    user.run("srun", "--partition=urgent", "--exclusive", "true")
    for job, kind in zip(jobs, KINDS, strict=True):
        fields = user.cluster.wait(job)
        assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), (kind, stand_in_output(user, job))
        assert "stopped with a checkpoint: requeued" in stand_in_output(user, job), kind


@pytest.mark.slow
@at_once
def test_cancelled_job_stays_cancelled(user):
    jobs = [submit_stand_in(user, "run", kind=kind) for kind in KINDS]
    for job in jobs:
        wait_for_stand_in(user, job)
        user.run("scancel", job)
    for job, kind in zip(jobs, KINDS, strict=True):
        fields = user.cluster.wait(job)
        assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0"), (kind, stand_in_output(user, job))


@pytest.mark.slow
@at_once
def test_a_cancelled_job_of_mpirun_leaves_a_checkpoint(user):
    """Also in a round of seconds: at a signal of its own, mpirun would kill the ranks after one."""
    train = (*TRAIN[:2], "--local-steps", 500, "--rounds", 40, "--checkpoint-every", 0)
    job = user.submit("train", "--", *train, "--out", "run")
    user.wait_for_round("run", 1, job)
    user.run("scancel", job)
    fields = user.cluster.wait(job)
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0"), user.output(job)
    assert "ranks by mpirun" in user.output(job)
    assert "submit it again to resume" in user.output(job)
    summary = json.loads((user.folder / "run/summary.json").read_text())
    assert (summary["status"], summary.get("left", [])) == ("stopped", [])
    assert 1 <= summary["rounds"] < 40


@pytest.mark.slow
@at_once
def test_failing_job_gives_up(user):
    user.environment["FEDLADA_MAX_FAILURES"] = "1"
    job = submit_stand_in(user, "fail", "-n", "1")  # the status of two would depend on which of them ends first
    fields = user.cluster.wait(job)
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "1:0", "1"), stand_in_output(
        user, job
    )
    assert "failed 2 times in a row: not requeued" in stand_in_output(user, job)
    assert not list((user.folder / "logs").glob(".state-*"))


@pytest.mark.slow
@at_once
def test_step_that_cannot_start_is_a_failure(user):
    user.environment["FEDLADA_MAX_FAILURES"] = "0"
    job = submit_stand_in(user, "run", "--hold")
    # What a job of the same number, killed with its node, leaves behind; srun then returns 0.
    (user.cluster.root / "tmp" / f"spmix_appdir_0_{job}.0").mkdir()
    user.run("scontrol", "release", job)
    fields = user.cluster.wait(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "1:0"), stand_in_output(user, job)
    assert "the ranks could not be started" in stand_in_output(user, job)
