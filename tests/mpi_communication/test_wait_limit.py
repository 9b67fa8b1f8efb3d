"""Waiting for other ranks has a limit."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from fedlada_mpi.mpi.wait_limit import WaitLimit


def wait_until(condition) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_waiting_in_one_block_counts():
    ended = threading.Event()
    limit = WaitLimit(0.4, ended.set)
    for _ in range(6):
        time.sleep(0.1)  # computing
        with limit, limit:
            time.sleep(0.2)
    assert not ended.is_set()
    with limit:
        assert ended.wait(5)


def test_no_limit_and_no_world_leave_no_thread():
    before = threading.active_count()
    WaitLimit(0)
    assert threading.active_count() == before
    WaitLimit(3600).close()
    wait_until(lambda: threading.active_count() == before)


HANGS = """
import os, signal, sys
from mpi4py import MPI
from fedlada_mpi.run import main
from fedlada_mpi.rounds.trainer import Trainer
train = Trainer.round
def round(self, s, r, *more):
    if r.t == 2 and MPI.COMM_WORLD.rank == 1:
        print("process", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return train(self, s, r, *more)
Trainer.round = round
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run(mpirun, tmp_path):
    out = tmp_path / "run"
    settings = ("--rounds", 4, "--data-dir", tmp_path, "--out", out, "--checkpoint-every", 1, "--algorithm", "scaffold")
    done = mpirun(3, *settings, "--patience", 8, command=("-c", HANGS))
    assert done.returncode == 4, done.stdout + done.stderr
    assert "has waited 8 s for other ranks: one of them hangs, or its node cannot be reached: --resume" in done.stderr
    (process,) = re.findall(r"process (\d+)", done.stdout)  # anywhere: lines of several ranks may meet in one
    wait_until(lambda: not Path("/proc", process).exists())
    resumed = mpirun(1, *settings, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after round 1" in resumed.stdout  # all ranks complete that of round 2 after the next one


ASLEEP = """
import sys, time
from mpi4py import MPI
from fedlada_mpi.run import main
from fedlada_mpi.mpi import World
barrier = World.barrier
def sleepy(self):
    barrier(self)
    if MPI.COMM_WORLD.rank == 1 and sys._getframe(1).f_code.co_name == sys.argv[1]:
        time.sleep(600)
World.barrier = sleepy
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "setting"), [("over_participants", "--robust=median"), ("_allreduce", "--sums=exact")]
)
def test_a_rank_asleep_between_the_barrier_and_the_call(mpirun, tmp_path, digits_dir, function, setting):
    settings = (setting, "--rounds", 4, "--dataset", digits_dir, "--out", tmp_path / "run", "--patience", 2)
    done = mpirun(3, function, *settings, "--device", "cpu", command=("-c", ASLEEP))
    assert done.returncode == 4, done.stdout + done.stderr
    assert "has waited 2 s for other ranks" in done.stderr


STARTS = """
import os, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(600)
import fedlada_mpi.mpi
"""


def test_the_start_has_a_limit_too(mpirun):
    done = mpirun(2, command=("-c", STARTS), env={"FEDLADA_START_LIMIT": "1.5"})
    assert done.returncode == 4, done.stderr
    assert "has waited 1.5 s for the other ranks to start" in done.stderr
