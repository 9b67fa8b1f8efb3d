"""A process without a launcher starts MPI without networks, whose search takes a second; ranks search as they did."""

from __future__ import annotations

import os
import subprocess

import pytest
from ranks import python
from repository import ROOT

from fedlada_mpi.mpi.starting import alone

NETWORKS = "OMPI_MCA_btl"
LAUNCHERS = ("PMI", "OMPI_COMM_", "SLURM_", "MV2_", "MVP_", "FLUX_", "PALS_", "ALPS_", "JSM_")
# What MPI finds as it starts, and what is left for processes that come later.
SHOWN = f"""
import os, sys

class Note:
    def find_spec(name, *_):
        if name == "mpi4py.MPI":
            print(os.environ.get("{NETWORKS}"))

sys.meta_path.insert(0, Note)
import fedlada_mpi.mpi
print(os.environ.get("{NETWORKS}"))
print(sys.modules["mpi4py.MPI"].COMM_WORLD.allreduce(3))
"""


@pytest.fixture
def environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith(LAUNCHERS) or name == NETWORKS]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_only_while_it_starts(environment):
    with alone():
        assert os.environ[NETWORKS] == "self"
    assert NETWORKS not in os.environ
    with pytest.raises(ImportError), alone():
        raise ImportError
    assert NETWORKS not in os.environ


@pytest.mark.parametrize(
    "name",
    [
        "PMIX_RANK",
        "PMI_RANK",
        "PMI2_FD",
        "OMPI_COMM_WORLD_SIZE",
        "SLURM_STEP_NUM_TASKS",
        "FLUX_JOB_SIZE",
        "PALS_RANKID",
    ],
)
def test_a_launchers_process_keeps_its_networks(name, environment):
    environment.setenv(name, "1")
    with alone():
        assert NETWORKS not in os.environ


def test_the_users_choice_stays(environment):
    environment.setenv(NETWORKS, "^tcp")
    with alone():
        assert os.environ[NETWORKS] == "^tcp"
    assert os.environ[NETWORKS] == "^tcp"


def test_mpi_starts_so(environment):
    clean = {**os.environ, "PYTHONPATH": str(ROOT)}  # without what MPI has set in this process, unseen by Python
    done = subprocess.run([python(), "-c", SHOWN], env=clean, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["self", "None", "3"], "")
