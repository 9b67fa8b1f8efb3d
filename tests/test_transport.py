"""Vectors and small messages between ranks; every test runs in the world that it finds, of 1, 2 or 4 ranks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mpi4py import MPI
from world import SIZE

from fedlada_mpi import mpi, mpi_shared, mpi_transport
from fedlada_mpi.errors import UserError

CPU = torch.device("cpu")
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")


@pytest.fixture
def ranks():
    world = mpi.World()
    yield world
    world.close()


@pytest.mark.serial
def test_this_file_on_two_ranks(mpirun):
    done = mpirun(
        2, "-m", "pytest", "--with-mpi", "-q", "--color=no", "-p", "no:cacheprovider", "--timeout=60",
        "--timeout-method=thread", __file__, command=("-m", "mpi4py"), cwd=Path(__file__).parent,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert " passed" in output
    assert " failed" not in output


def part(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's vector: small whole numbers, so that every order of summing gives the same."""
    return torch.from_numpy(np.random.default_rng(rank).integers(-999, 999, size)).to(dtype)


def total(size: int, dtype: torch.dtype) -> torch.Tensor:
    return sum(part(rank, size, dtype) for rank in range(SIZE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 17, 1000, (1 << 16) * 4 + 37])
@pytest.mark.parametrize("kind", ["host", "shared"])
def test_sums_and_copies(kind, size, dtype, ranks):
    transport = mpi_transport.Transport(ranks, size, dtype, CPU, kind)
    assert transport.kind == (kind if SIZE > 1 else "none")
    for repeat in range(3):
        first, second = part(ranks.rank, size, dtype) * (repeat + 1), -part(ranks.rank, size, dtype)
        mine = first.clone()
        transport.reduce([first, second])
        if ranks.rank == 0:
            assert torch.equal(first, total(size, dtype) * (repeat + 1))
            assert torch.equal(second, -total(size, dtype))
        else:
            assert torch.equal(first, mine), "only rank 0 has the sum"
        first = part(7 + ranks.rank, size, dtype) + repeat
        transport.bcast([first])
        assert torch.equal(first, part(7, size, dtype) + repeat)
    per_vector = (SIZE - 1) * size * dtype.itemsize
    assert ranks.bytes_moved == 9 * per_vector


def test_sums_of_fractions(ranks):
    """In double, of numbers that do round: against numpy's sum."""
    rows = np.random.default_rng(0).normal(size=(SIZE, 4099))
    for kind in ("host", "shared"):
        vector = torch.from_numpy(rows[ranks.rank].copy())
        mpi_transport.Transport(ranks, 4099, torch.float64, CPU, kind).reduce([vector])
        if ranks.rank == 0:
            np.testing.assert_allclose(vector, rows.sum(0), rtol=1e-13, atol=1e-14)


@several
@pytest.mark.parametrize("size", [3, 100_003])
def test_two_levels(size, ranks):
    """Nodes of two ranks (of one, in a world of two): within a node by the window, between nodes by the library."""
    real, per_node = ranks.node, max(1, SIZE // 2)
    ranks.node = ranks.comm.Split(ranks.rank // per_node, ranks.rank)
    assert ranks.node.size == per_node
    try:
        transport = mpi_transport.Transport(ranks, size, torch.float32, CPU, "shared")
        assert transport._window.leaders == MPI.COMM_NULL or transport._window.leaders.size == SIZE // per_node
        for _ in range(3):
            vector = part(ranks.rank, size, torch.float32)
            transport.reduce([vector])
            if ranks.rank == 0:
                assert torch.equal(vector, total(size, torch.float32))
            vector = part(7 + ranks.rank, size, torch.float32)
            transport.bcast([vector])
            assert torch.equal(vector, part(7, size, torch.float32))
    finally:
        ranks.node.Free()
        ranks.node = real


def test_vectors_of_another_plan_are_refused(ranks):
    transport = mpi_transport.Transport(ranks, 10, torch.float32, CPU, "host")
    if SIZE == 1:
        return
    for wrong in (torch.zeros(11), torch.zeros(10, dtype=torch.float64), torch.zeros(20)[::2]):
        with pytest.raises(AssertionError):
            transport.bcast([wrong])


@several
@pytest.mark.parametrize("kind", ["host", "shared"])
def test_neighbours_travel_together(kind, ranks):
    """Rows of one matrix; between two of them lies one that stays at home."""
    rows = torch.stack([part(ranks.rank + 10 * i, 33, torch.float64) for i in range(4)])
    mine = rows.clone()
    transport = mpi_transport.Transport(ranks, 33, torch.float64, CPU, kind)
    transport.reduce([rows[0], rows[1]])
    transport.reduce([rows[3]])
    expected = mine.clone()
    if ranks.rank == 0:
        for i in (0, 1, 3):
            expected[i] = sum(part(rank + 10 * i, 33, torch.float64) for rank in range(SIZE))
    assert torch.equal(rows, expected)
    rows.copy_(mine)
    transport.bcast([rows[3], rows[1]])
    expected = mine.clone()
    for i in (1, 3):
        expected[i] = part(10 * i, 33, torch.float64)
    assert torch.equal(rows, expected)
    assert ranks.bytes_moved == (SIZE - 1) * 5 * 33 * 8


@several
def test_little_shared_memory_means_the_library(ranks, monkeypatch):
    """A window needs the vector once for every rank of the node, and 1.2 for room to spare; one node that is short
    decides for all."""
    size = 1_200_000
    needed, block = int(1.2 * SIZE * 4 * size), 512

    def room(bytes_free):
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=bytes_free // block, f_frsize=block))

    room(needed + 2 * block)
    assert mpi_shared.fits(ranks, 4 * size)
    assert mpi_transport.Transport(ranks, 1000, torch.float32, CPU).kind == "host", "small vectors need no window"
    assert mpi_transport.Transport(ranks, size, torch.float32, CPU).kind == "shared"
    room(needed - block)
    assert not mpi_shared.fits(ranks, 4 * size)
    room(10**9 if ranks.rank else 0)
    transport = mpi_transport.Transport(ranks, size, torch.float32, CPU)
    assert transport.kind == "host"
    vector = part(ranks.rank, size, torch.float32)
    transport.reduce([vector])
    if ranks.rank == 0:
        assert torch.equal(vector, total(size, torch.float32))

    def absent(path):
        raise OSError

    monkeypatch.setattr(os, "statvfs", absent)
    assert not mpi_shared.fits(ranks, 4 * size)


def test_a_rank_alone_on_its_node_shares_with_nobody():
    assert not mpi_shared.worth_it(SimpleNamespace(node=SimpleNamespace(size=1)), 2**30)


@several
@pytest.mark.parametrize("kind", ["direct", "staged"])
def test_transports_of_the_gpu_are_refused_on_the_cpu(kind, ranks):
    with pytest.raises(UserError, match=rf"^--transport {kind}.*use auto"):
        mpi_transport.Transport(ranks, 10, torch.float32, CPU, kind)


def test_tell(ranks):
    message = {"do": "round", "participants": list(range(300)), "text": "ä" * 1000, "rate": 0.1 + 0.2}
    for expected in (message, {"do": "end"}, message):
        assert ranks.tell(expected if ranks.rank == 0 else None) == expected


def test_collect(ranks):
    found = ranks.collect([ranks.rank, 0.5 * ranks.rank, -1.0])
    if ranks.rank == 0:
        assert found.tolist() == [[rank, 0.5 * rank, -1.0] for rank in range(SIZE)]
    else:
        assert found.shape == (0, 3)


def fail(words: str):
    raise UserError(words)


def test_an_error_on_one_rank_is_raised_on_all(ranks):
    assert ranks.together(lambda: ranks.rank * 10) == ranks.rank * 10
    last = SIZE - 1
    with pytest.raises(UserError, match=r"^rank ä was wrong$"):
        ranks.together(lambda: fail("rank ä was wrong") if ranks.rank == last else "fine")
    with pytest.raises(UserError, match=r"^0 was wrong$"):
        ranks.together(lambda: fail(f"{ranks.rank} was wrong"))
    with pytest.raises(UserError, match=r"^failed$"):
        ranks.together(lambda: fail(""))
    assert ranks.together(lambda: "again") == "again"


def test_rank_0_alone(ranks):
    acted = []
    assert ranks.alone(lambda: acted.append(1) or "done") == ("done" if ranks.rank == 0 else None)
    assert acted == ([1] if ranks.rank == 0 else [])
    with pytest.raises(UserError, match=r"^no room$"):
        ranks.alone(lambda: fail("no room"))


@several
def test_waiting_is_counted(ranks):
    ranks.wait()
    ranks.seconds_waiting = 0.0
    if ranks.rank == 0:
        time.sleep(0.5)
    ranks.wait()
    assert (ranks.seconds_waiting > 0.1) == (ranks.rank != 0)


def test_local_rank_is_the_launchers_or_the_nodes(ranks, monkeypatch):
    for name in mpi._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    assert ranks.local_rank == ranks.node.rank
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert ranks.local_rank == 3


def test_a_closed_world_leaves_nothing_behind():
    world = mpi.World()
    assert sys.excepthook == world._excepthook
    world.close()
    assert sys.excepthook is sys.__excepthook__
    assert world.comm == MPI.COMM_NULL


@pytest.mark.serial
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
        mpi.World()
    assert str(found.value).startswith("the launcher started 11 processes, but MPI (")
    assert str(found.value).endswith(f"sees a world of 1: start them with {words}")
