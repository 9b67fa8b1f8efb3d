"""Vectors between ranks; every test runs in the world that it finds, of 1, 2 or 4 ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import SIZE

from fedlada_mpi.errors import UserError
from fedlada_mpi.mpi import shared_window
from fedlada_mpi.mpi.plan import plan_transport

CPU = torch.device("cpu")
several = pytest.mark.skipif(SIZE == 1, reason="needs several ranks")


def part(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's vector: small whole numbers, so that every order of summing gives the same."""
    return torch.from_numpy(np.random.default_rng(rank).integers(-999, 999, size)).to(dtype)


def total(size: int, dtype: torch.dtype) -> torch.Tensor:
    return sum(part(rank, size, dtype) for rank in range(SIZE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 17, 1000, (1 << 16) * 4 + 37])
@pytest.mark.parametrize("kind", ["host", "shared"])
def test_sums_and_copies(kind, size, dtype, ranks):
    transport = plan_transport(ranks, size, dtype, CPU, kind)
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
        plan_transport(ranks, 4099, torch.float64, CPU, kind).reduce([vector])
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
        transport = plan_transport(ranks, size, torch.float32, CPU, "shared")
        assert transport.leaders == MPI.COMM_NULL or transport.leaders.size == SIZE // per_node
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


@several
@pytest.mark.parametrize("uneven", ["one rank alone", "no room on one node"])
def test_every_node_decides_on_its_window(uneven, ranks, monkeypatch):
    """The first rank alone and the others together; or two nodes, of which the second has no room."""
    size, real = 1_200_000, ranks.node
    second = ranks.rank >= (1 if uneven == "one rank alone" else SIZE // 2)
    ranks.node = ranks.comm.Split(int(second), ranks.rank)
    free = 0 if second and uneven == "no room on one node" else 10**9
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
    try:
        transport = plan_transport(ranks, size, torch.float32, CPU)
        assert transport.kind == ("shared" if SIZE > 2 else "host")
        if SIZE > 2:
            assert transport.node.size == (ranks.node.size if free else 1)
        for _ in range(2):
            vector = part(ranks.rank, size, torch.float32)
            transport.reduce([vector])
            assert ranks.rank or torch.equal(vector, total(size, torch.float32))
            vector = part(7 + ranks.rank, size, torch.float32)
            transport.bcast([vector])
            assert torch.equal(vector, part(7, size, torch.float32))
        transport.close()
    finally:
        ranks.node.Free()
        ranks.node = real


def test_vectors_of_another_plan_are_refused(ranks):
    transport = plan_transport(ranks, 10, torch.float32, CPU, "host")
    if SIZE == 1:
        return
    for wrong in (torch.zeros(11), torch.zeros(10, dtype=torch.float64), torch.zeros(20)[::2]):
        with pytest.raises(AssertionError):
            transport.bcast([wrong])


@several
@pytest.mark.parametrize("kind", ["host", "shared"])
def test_neighbours_travel_together(kind, ranks):
    """Rows of one matrix; between two of them is one that does not travel."""
    rows = torch.stack([part(ranks.rank + 10 * i, 33, torch.float64) for i in range(4)])
    mine = rows.clone()
    transport = plan_transport(ranks, 33, torch.float64, CPU, kind)
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
    assert shared_window.fits(ranks, 4 * size)
    assert plan_transport(ranks, 1000, torch.float32, CPU).kind == "host", "small vectors need no window"
    assert plan_transport(ranks, size, torch.float32, CPU).kind == "shared"
    room(needed - block)
    assert not shared_window.fits(ranks, 4 * size)
    room(10**9 if ranks.rank else 0)
    transport = plan_transport(ranks, size, torch.float32, CPU)
    assert transport.kind == "host"
    vector = part(ranks.rank, size, torch.float32)
    transport.reduce([vector])
    if ranks.rank == 0:
        assert torch.equal(vector, total(size, torch.float32))

    def absent(path):
        raise OSError

    monkeypatch.setattr(os, "statvfs", absent)
    assert not shared_window.fits(ranks, 4 * size)


def test_a_rank_alone_on_its_node_needs_no_window():
    assert not shared_window.worth_it(SimpleNamespace(node=SimpleNamespace(size=1)), 2**30)


@several
@pytest.mark.parametrize("kind", ["direct", "staged"])
def test_transports_of_the_gpu_are_refused_on_the_cpu(kind, ranks):
    with pytest.raises(UserError, match=rf"^--transport {kind}.*use auto"):
        plan_transport(ranks, 10, torch.float32, CPU, kind)
