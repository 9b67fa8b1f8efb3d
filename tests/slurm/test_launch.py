"""The run under srun: with the right --mpi, and without."""

from __future__ import annotations

import json

import pytest
from at_once import at_once
from limits import LIMIT
from ranks import python

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]


@at_once
def test_eleven_ranks_end_with_one_summary(user):
    done = user.run(
        "srun", "--mpi=pmix", "-n", 11, python(), "-m", "fedlada_mpi.run", "--rounds", 2, "--local-epochs", 1,
        "--out", "run", timeout=LIMIT,
    )  # fmt: skip
    summary = json.loads((user.folder / "run/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["rounds"] == 2
    assert user.last_round("run") == 2
    assert (user.folder / "run/model.pt").stat().st_size > 0
    assert done.stdout.count("finished after 2 rounds") == 1, done.stdout  # eleven ranks, one report


@at_once
def test_without_mpi_there_is_a_hint_and_nothing_is_written(user):
    run = (python(), "-m", "fedlada_mpi.run", "--rounds", 2, "--out", "run")
    done = user.run("srun", "--mpi=none", "-n", 3, *run, check=False)
    assert done.returncode == 2, done.stderr
    assert "srun --mpi=pmix" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (user.folder / "run").exists()
