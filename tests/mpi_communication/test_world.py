"""Small messages, barriers and failures; every test runs in the world that it finds, of 1, 2 or 4 ranks."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from ranks import SIZE

from fedlada_mpi.mpi import World, world
from fedlada_mpi.support.errors import UserError

pytestmark = pytest.mark.ranks
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")


def test_broadcast_json(ranks):
    message = {"do": "round", "participants": list(range(300)), "text": "ä" * 1000, "rate": 0.1 + 0.2}
    for expected in (message, {"do": "end"}, message):
        assert ranks.broadcast_json(expected if ranks.rank == 0 else None) == expected


def test_gather(ranks):
    found = ranks.gather([ranks.rank, 0.5 * ranks.rank, -1.0])
    if ranks.rank == 0:
        assert found.tolist() == [[rank, 0.5 * rank, -1.0] for rank in range(SIZE)]
    else:
        assert found.shape == (0, 3)


def test_reduce_sum(ranks):
    table = np.array([[1.0, 10.0 * ranks.rank], [0.5, 0.0]])
    found = ranks.reduce_sum(table)
    if ranks.rank == 0:
        assert found.tolist() == [[SIZE, 10.0 * sum(range(SIZE))], [0.5 * SIZE, 0.0]]
    assert table.tolist() == [[1.0, 10.0 * ranks.rank], [0.5, 0.0]], "the rank's own stays"


def fail(words: str):
    raise UserError(words)


def test_an_error_on_one_rank_is_raised_on_all(ranks):
    assert ranks.collectively(lambda: ranks.rank * 10) == ranks.rank * 10
    last = SIZE - 1
    with pytest.raises(UserError, match=r"^rank ä was wrong$"):
        ranks.collectively(lambda: fail("rank ä was wrong") if ranks.rank == last else "fine")
    with pytest.raises(UserError, match=r"^0 was wrong$"):
        ranks.collectively(lambda: fail(f"{ranks.rank} was wrong"))
    with pytest.raises(UserError, match=r"^failed$"):
        ranks.collectively(lambda: fail(""))
    assert ranks.collectively(lambda: "again") == "again"


def test_on_root(ranks):
    acted = []
    assert ranks.on_root(lambda: acted.append(1) or "done") == ("done" if ranks.rank == 0 else None)
    assert acted == ([1] if ranks.rank == 0 else [])
    with pytest.raises(UserError, match=r"^no room$"):
        ranks.on_root(lambda: fail("no room"))


@several
def test_waiting_is_counted(ranks):
    ranks.barrier()
    ranks.seconds_waiting = 0.0
    if ranks.rank == 0:
        time.sleep(0.5)
    ranks.barrier()
    assert (ranks.seconds_waiting > 0.1) == (ranks.rank != 0)


def test_local_rank_is_the_launchers_or_the_nodes(ranks, monkeypatch):
    for name in world._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    assert ranks.local_rank == ranks.node.rank
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert ranks.local_rank == 3


def test_a_closed_world_leaves_nothing_behind():
    before = sys.excepthook
    first, second = World(), World()
    assert sys.excepthook is world._end_all_ranks
    first.close()
    assert sys.excepthook is world._end_all_ranks
    second.close()
    assert sys.excepthook is before
    assert first.comm == second.comm == MPI.COMM_NULL


@pytest.mark.skipif(SIZE > 1, reason="is about a world of one by mistake")
@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("SLURM_STEP_NUM_TASKS", "srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)"),
        ("PMI_SIZE", "the mpirun of the same MPI library"),
    ],
)
def test_processes_that_do_not_see_each_other(variable, words, monkeypatch):
    monkeypatch.setenv(variable, "11")
    with pytest.raises(UserError) as found:
        World()
    assert str(found.value).startswith("the launcher started 11 processes, but MPI (")
    assert str(found.value).endswith(f"sees a world of 1: start them with {words}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Open MPI v5.0.9, package: Open MPI root@host Distribution, ident: 5.0.9, Oct 30, 2025\0", "Open MPI v5.0.9"),
        ("MPICH Version:      4.1.2\nMPICH Release date: Wed Jun  7 15:22:45 CDT 2023\n", "MPICH 4.1.2"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS\n", "Intel(R) MPI Library 2021.11 for Linux* OS"),
    ],
)
def test_the_librarys_name_in_a_few_words(text, words, monkeypatch):
    monkeypatch.setattr(MPI, "Get_library_version", lambda: text)
    assert world.implementation() == words


@several
def test_closing_leaves_no_thread_behind():
    before = set(threading.enumerate())
    own = World()
    own.limit_waiting(3600, "", lambda: None)
    own.close()
    assert set(threading.enumerate()) == before


@pytest.mark.ranks
def test_a_broadcast_message_is_the_receivers_own(ranks):
    """On one rank, too: who adds to what was received does not add to what the root keeps."""
    kept = {"records": [1]}
    ranks.broadcast_json(kept)["records"].append(2)
    assert kept == {"records": [1]}
