"""The graph of masks: as connected as it says, for every set of silos that is taken out."""

from __future__ import annotations

from itertools import combinations

import pytest

from fedlada_mpi.privacy.graph import degree, neighbours


def connected(nodes: set[int], edges: dict[int, list[int]]) -> bool:
    reached, new = set(), {min(nodes)}
    while new:
        reached |= new
        new = {other for node in new for other in edges[node] if other in nodes} - reached
    return reached == nodes


@pytest.mark.parametrize("silos", range(3, 11))
def test_any_k_minus_1_silos_may_be_taken_out(silos):
    for asked in range(2, silos):
        k = degree(silos, asked)
        edges = {i: neighbours(i, silos, k) for i in range(silos)}
        assert all(len(set(near) - {i}) == k for i, near in edges.items())
        assert all(i in edges[j] for i, near in edges.items() for j in near)
        for number in range(k):
            for gone in combinations(range(silos), number):
                assert connected(set(range(silos)) - set(gone), edges), (silos, k, gone)
        if k < silos - 1:  # and not one more
            assert not connected(set(range(silos)) - set(edges[0]), edges)


def test_degrees():
    assert [degree(n, None) for n in (3, 16, 17, 100)] == [2, 15, 8, 8]
    assert degree(100, None, everyone=True) == 99
    assert degree(5, 9) == 4
    assert degree(7, 3) == 4  # there is no graph of 7 with 3 each
    assert degree(8, 3) == 3
    assert neighbours(0, 8, 3) == [1, 4, 7]
    assert neighbours(5, 6, 2) == [0, 4]
