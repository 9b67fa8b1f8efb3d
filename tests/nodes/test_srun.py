"""Runs under SLURM over two pretend nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import tolerant_mpirun
from repository import ROOT
from slurm_nodes import SlurmNodes, missing
from test_nodes import GPUS, SETTINGS, SIZES
from training_runs import Run, arguments, disagreement, make_data, run_here

from fedlada_mpi.support.launcher import settings

pytestmark = [pytest.mark.nodes, pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]

# The last rank, in the second round.
DIES = """
import os, signal
from fedlada_mpi.run import command
from fedlada_mpi.rounds.trainer import Trainer
train = Trainer.round
def round(self, s, r, *more):
    if r.t == 2 and os.environ["OMPI_COMM_WORLD_RANK"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    return train(self, s, r, *more)
Trainer.round = round
command()
"""


@pytest.fixture(scope="session")
def slurm(nodes):
    if reason := missing():
        pytest.skip(reason)
    with SlurmNodes(nodes, 2) as slurm:
        yield slurm


def test_two_nodes(slurm, shared_tmp, tmp_path):
    """Three ranks and one, as srun places them, on the GPUs of their nodes; results are those of one process."""
    data = make_data(shared_tmp / "srun", SIZES, silos=2)
    alone = run_here(data, tmp_path / "alone", **SETTINGS)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    line = arguments(data, tmp_path / "run", SETTINGS)
    srun = ["srun", "--mpi=pmix", "-K", "-N", 2, "-n", 4, slurm.nodes.python(2), "-c", GPUS]
    done = slurm.run([*srun, *line], env)
    assert done.returncode == 0, done.stdout + done.stderr + slurm.logs()
    chosen = sorted(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("GPU"))
    assert chosen == [["n1", "0"], ["n1", "0"], ["n1", "1"], ["n2", "0"]]
    run = Run(tmp_path / "run", data)
    assert run.participants == alone.participants
    assert disagreement(run.x, alone.x, data.start) < 1e-10
    assert [*run.summary["segments"][0]["nodes"]] == ["n1", "n2"]


def test_ranks_by_mpirun_inside_an_allocation(slurm, shared_tmp, tmp_path):
    """As jobs start them with FEDLADA_MPI=ulfm: a rank that dies on one node does not end those of the other."""
    mpirun = tolerant_mpirun()
    data = make_data(shared_tmp / "mpirun", SIZES, silos=2)
    (tmp_path / "state").mkdir()
    path = os.pathsep.join([str(Path(mpirun).parent), os.environ["PATH"]])
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])), "PATH": path}
    env |= {"FEDLADA_STATE": str(tmp_path / "state"), **settings()}
    launch = ["salloc", "-N", 2, "-n", 4, "bash", ROOT / "jobs/launch.sh", "ulfm", slurm.nodes.python(2), "-c", DIES]
    done = slurm.run([*launch, *arguments(data, tmp_path / "run", SETTINGS)], env)
    assert done.returncode == 0, done.stdout + done.stderr + slurm.logs()
    summary = Run(tmp_path / "run", data).summary
    assert summary["status"] == "finished"
    assert [lost["rank"] for lost in summary["left"]] == [3]
    assert [*summary["segments"][0]["nodes"]] == ["n1", "n2"]
