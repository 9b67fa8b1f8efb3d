"""Vectors between ranks; every test runs in the world that it finds, of 1, 2 or 4 ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import SIZE

from fedlada_mpi.mpi import relay, shared_window
from fedlada_mpi.mpi.plan import plan_transport
from fedlada_mpi.support.errors import UserError

CPU = torch.device("cpu")
pytestmark = pytest.mark.ranks
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


@pytest.fixture
def two_nodes(ranks):
    """Nodes of two ranks; of one, in a world of two."""
    real, per_node = ranks.node, max(1, SIZE // 2)
    ranks.node = ranks.comm.Split(ranks.rank // per_node, ranks.rank)
    assert ranks.node.size == per_node
    yield ranks
    ranks.node.Free()
    ranks.node = real


@several
@pytest.mark.parametrize("size", [3, 100_003])
@pytest.mark.parametrize("piece", [1 << 18, 10_001])
def test_two_levels(size, piece, two_nodes, monkeypatch):
    """Within a node by the window, between nodes in pieces."""
    monkeypatch.setattr(relay, "PIECE", piece)
    transport = plan_transport(two_nodes, size, torch.float32, CPU, "shared")
    assert transport.leaders == MPI.COMM_NULL or transport.leaders.size == transport.nodes == 2
    for _ in range(3):
        vector = part(two_nodes.rank, size, torch.float32)
        transport.reduce([vector])
        if two_nodes.rank == 0:
            assert torch.equal(vector, total(size, torch.float32))
        vector = part(7 + two_nodes.rank, size, torch.float32)
        transport.bcast([vector])
        assert torch.equal(vector, part(7, size, torch.float32))
    transport.close()


@several
@pytest.mark.parametrize("most", [1, 2], ids=["chain", "tree"])
def test_every_rank_a_node_of_its_own(most, ranks, monkeypatch):
    monkeypatch.setattr(relay, "children", lambda nodes, pieces: most)
    monkeypatch.setattr(relay, "PIECE", 100)
    real, ranks.node = ranks.node, MPI.COMM_SELF
    try:
        transport = plan_transport(ranks, 1234, torch.float64, CPU, "shared")
        assert len(transport._relay.children) == min(most, max(0, SIZE - 1 - most * ranks.rank))
        for _ in range(2):
            vector = part(ranks.rank, 1234, torch.float64)
            transport.reduce([vector])
            assert ranks.rank or torch.equal(vector, total(1234, torch.float64))
            transport.bcast([vector])
            assert torch.equal(vector, total(1234, torch.float64))
        transport.close()
    finally:
        ranks.node = real


def test_a_tree_where_it_is_faster():
    """13 pieces: 13 + 8 - 2 hops along a chain of 8 nodes, 2 * (13 + 3 - 1) in a tree; of 64 nodes 75 and 36."""
    assert [relay.children(nodes, 13) for nodes in (2, 3, 8, 64)] == [1, 1, 1, 2]
    assert relay.children(8, 1) == 2


def fractions(seed: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=size).astype(np.float32))


@several
@pytest.mark.parametrize("piece", [1 << 18, 1000])
def test_what_crosses_between_nodes_is_rounded(piece, two_nodes, monkeypatch):
    """And only that: the root's node adds up in float32, and every rank ends with the same bits."""
    monkeypatch.setattr(relay, "PIECE", piece)
    size, half = 5003, SIZE // 2
    transport = plan_transport(two_nodes, size, torch.float32, CPU, wire="bf16")
    assert (transport.kind, transport.rounds) == ("shared", True)
    vector = fractions(two_nodes.rank, size)
    transport.reduce([vector])
    first, second = (sum(fractions(rank, size) for rank in node) for node in (range(half), range(half, SIZE)))
    assert two_nodes.rank or torch.equal(vector, first + second.bfloat16().float())

    before = fractions(100, size)
    new = before + 1e-3 * fractions(101, size)
    vector = new.clone() if two_nodes.rank == 0 else before.clone()
    transport.bcast_change(vector, before)
    assert torch.equal(vector, before + (new - before).bfloat16().float())
    assert (vector - new).abs().max() < 1e-3 * 2**-8 * 5
    assert two_nodes.bytes_moved == 2 * size * (4 * (SIZE - 2) + 2)

    vector = fractions(two_nodes.rank, size)
    transport.bcast([vector])
    assert torch.equal(vector, fractions(0, size)), "a start, and what is not a sum of changes, stays as it is"
    transport.close()


@several
def test_on_one_node_nothing_is_rounded(ranks):
    transport = plan_transport(ranks, 100, torch.float32, CPU, "host", wire="bf16")
    assert not transport.rounds
    vector = before = fractions(ranks.rank, 100)
    transport.bcast_change(vector, before)
    assert torch.equal(vector, fractions(0, 100))


@several
def test_only_one_transport_rounds(two_nodes):
    with pytest.raises(UserError, match=r"^--wire bf16 is for .*got host, expected auto"):
        plan_transport(two_nodes, 100, torch.float32, CPU, "host", wire="bf16")


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
