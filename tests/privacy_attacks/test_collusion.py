"""Silos that work together with the server: they take away every mask that one of them knows.

What is left of an honest silo is hidden by the masks that it shares with other honest ones. Adding up those of a
connected group removes these as well: a group's sum is learned, and a silo's own if it is alone in its group.
"""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np
import pytest
from uniformity import looks_random

from fedlada_mpi.privacy import graph
from fedlada_mpi.privacy.agreement import AES, CHACHA, Epoch
from fedlada_mpi.privacy.masks import add_streams

SIZE = 4096  # words that a silo sends


class Round:
    """A message of every silo, masked as in a round: what the server sees, and what nobody should."""

    def __init__(self, silos: int, degree: int, cipher: str = AES):
        names = tuple(f"silo_{i:02d}" for i in range(silos))
        self.neighbours = [graph.neighbours(i, silos, degree) for i in range(silos)]
        pairs = {
            frozenset((i, j)): hashlib.sha256(bytes((min(i, j), max(i, j), degree))).digest()
            for i in range(silos)
            for j in self.neighbours[i]
        }
        self.epochs = [
            Epoch(names, names[i], cipher, False, degree, {names[j]: pairs[frozenset((i, j))] for j in near})
            for i, near in enumerate(self.neighbours)
        ]
        values = np.random.default_rng(silos).integers(-1000, 1000, (silos, SIZE))
        self.plain, self.seen, self.cipher = values, values.copy(), cipher
        for words, epoch in zip(self.seen, self.epochs, strict=True):
            add_streams(words, epoch.streams("round 0", 3, b"received"), cipher)


class Colluders:
    """Solves for the honest silos' messages, from what all silos have sent and the colluders' own keys."""

    def __init__(self, observed: Round, colluders: tuple[int, ...]):
        silos = range(len(observed.seen))
        self.honest = [i for i in silos if i not in colluders]
        self.left = {i: observed.seen[i].copy() for i in self.honest}
        names = {epoch.own: i for i, epoch in enumerate(observed.epochs)}
        for epoch in (observed.epochs[i] for i in colluders):
            # The colluder's own streams have the opposite sign of those of its neighbours.
            streams = epoch.streams("round 0", 3, b"received")
            for other, stream in zip(epoch.keys, streams, strict=True):
                if names[other] in self.left:
                    add_streams(self.left[names[other]], [stream], observed.cipher)
        edges = [(i, j) for i in self.honest for j in observed.neighbours[i] if i < j and j in self.honest]
        self.unknown = np.zeros((len(edges), len(self.honest)))  # masks that are left, in whose message
        for row, (i, j) in zip(self.unknown, edges, strict=True):
            row[self.honest.index(i)], row[self.honest.index(j)] = 1, -1

    @property
    def learned(self) -> int:
        """How many independent sums of honest messages are free of masks."""
        return len(self.honest) - int(np.linalg.matrix_rank(self.unknown)) if len(self.unknown) else len(self.honest)


def test_the_masks_of_all_silos_cancel():
    observed = Round(5, 4)
    assert np.array_equal(observed.seen.sum(0), observed.plain.sum(0))


@pytest.mark.parametrize(("silos", "degree"), [(7, 2), (7, 4), (8, 3), (8, 7)])
def test_as_many_colluders_as_neighbours_learn_a_silos_message(silos, degree):
    observed = Round(silos, degree)
    attack = Colluders(observed, tuple(observed.neighbours[0]))
    assert np.array_equal(attack.left[0], observed.plain[0])


@pytest.mark.parametrize(("silos", "degree"), [(7, 2), (7, 4), (8, 3), (6, 5)])
def test_fewer_colluders_learn_the_honest_silos_sum_and_nothing_else(silos, degree):
    observed = Round(silos, degree)
    for colluders in combinations(range(silos), degree - 1):
        attack = Colluders(observed, colluders)
        assert attack.learned == 1, colluders
        honest = sum(attack.left.values())
        assert np.array_equal(honest, observed.plain[attack.honest].sum(0))
        if len(attack.honest) > 1:
            assert all(looks_random(words.tobytes()) for words in attack.left.values()), colluders


def test_an_outsider_sees_random_words():
    for cipher in (AES, CHACHA):
        observed = Round(3, 2, cipher)
        assert all(looks_random(words.tobytes()) for words in observed.seen)
        assert not any(looks_random(words.tobytes()) for words in observed.plain)


@pytest.mark.parametrize("silos", range(3, 12))
@pytest.mark.parametrize("asked", [2, 3, 4, 8, None])
def test_every_silo_has_as_many_neighbours_as_the_graph_promises(silos, asked):
    """And whoever is one's neighbour has one as a neighbour; less than was asked for only where there are no more."""
    degree = graph.degree(silos, asked)
    assert degree >= min(silos - 1, asked or silos - 1)
    near = [graph.neighbours(i, silos, degree) for i in range(silos)]
    for i, others in enumerate(near):
        assert len(others) == len(set(others)) == degree
        assert i not in others
        assert all(i in near[j] for j in others)
