"""A test run over several ranks ends, and reports why, whatever one rank does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from repository import ROOT

FAILS_ON_ONE_RANK = """
import pytest
pytestmark = pytest.mark.ranks

def test_first(world):
    world.Barrier()

def test_second(world):
    print("printed by", world.rank)
    assert world.rank != 1, "rank one is wrong"
{then}

def test_third(world):
    world.Barrier()
"""

FAILS_TO_IMPORT_ON_ONE_RANK = """
import os
import pytest
if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    raise ImportError("no such thing on rank two")

@pytest.mark.ranks
def test_barrier(world):
    world.Barrier()
"""

PASSES = """
import pytest

@pytest.mark.ranks
def test_barrier(world, shared_tmp):
    (shared_tmp / str(world.rank)).touch()
    world.Barrier()
    assert sorted(p.name for p in shared_tmp.iterdir()) == ["0", "1", "2"]

def test_alone():
    raise AssertionError("does not run in a world of three")
"""


@pytest.fixture
def suite(mpirun, tmp_path):
    """Run the given test file on 3 ranks under this suite's conftest."""

    def run(text: str):
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = ranks\n")
        (tmp_path / "test_given.py").write_text(text)
        options = ("-p", "conftest", "-p", "no:cacheprovider", "--timeout=80", "--timeout-method=thread")
        return mpirun(
            3, "-m", "pytest", "--with-mpi", "--color=no", *options, command=("-m", "mpi4py"), cwd=tmp_path,
            env={
                "PYTHONPATH": f"{ROOT}/tests:{ROOT}/tests/helpers",
                "PYTEST_ADDOPTS": "",
                "FEDLADA_TEST_LOG": str(tmp_path / "log"),
                "FEDLADA_TEST_AFTER_A_FAILURE": "3",
            },
        )  # fmt: skip

    return run


def test_failure_on_one_rank_is_reported_and_the_others_go_on(suite):
    done = suite(FAILS_ON_ONE_RANK.format(then=""))
    assert done.returncode != 0
    assert "FAILED test_given.py::test_second - rank 1 of 3: AssertionError: rank one is " in done.stdout
    assert "printed by 1" in done.stdout
    assert "1 failed, 3 passed" in done.stdout, "rank 0 has passed it"
    assert "+++ Timeout" not in done.stdout + done.stderr  # pytest-timeout would end a hang too


@pytest.mark.slow
def test_failure_on_one_rank_for_which_others_wait_ends_all(suite):
    """And the same command goes on with the next test."""
    text = FAILS_ON_ONE_RANK.format(then="    world.Barrier()")
    done = suite(text)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert output.count("rank 1 of 3: test_given.py::test_second (call) failed") == 1
    assert "rank one is wrong" in output
    assert "printed by 1" in output
    assert " passed in " not in output
    assert "+++ Timeout" not in output
    done = suite(text)
    assert done.returncode != 0
    assert "FAILED test_given.py::test_second - ended all ranks of an earlier start" in done.stdout
    assert "1 passed, 2 deselected" in done.stdout


@pytest.mark.slow
def test_collection_error_on_one_rank_ends_all(suite):
    done = suite(FAILS_TO_IMPORT_ON_ONE_RANK)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "no such thing on rank two" in output
    assert "+++ Timeout" not in output  # pytest-timeout would end a hang too


@pytest.mark.slow
def test_success_reads_as_one_run(suite):
    done = suite(PASSES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed, 1 deselected") == 1
    assert done.stdout.count("test session starts") == 1


@pytest.mark.slow
def test_time_limit_stops_all_ranks(mpirun, tmp_path):
    program = "import os, pathlib, time; pathlib.Path(str(os.getpid())).touch(); time.sleep(600)"
    with pytest.raises(pytest.fail.Exception, match="not finished after 8 s"):
        mpirun(2, command=("-c", program), timeout=8, cwd=tmp_path)
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 2
    deadline = time.monotonic() + 100
    while alive := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
