"""The partitions against draws followed by hand, an independent version, and what must always hold."""

from __future__ import annotations

import bisect
import hashlib

import numpy as np
import pytest

from fedlada_mpi.data.partition import Rule, client_sizes, deal, fill, natural, partition, pathological_quotas
from fedlada_mpi.support.errors import UserError

LABELS = np.arange(6000) % 10
REFILL = Rule("dirichlet", dirichlet=0.6, exhausted="refill", size_sigma=0.0)
EXACT = Rule("dirichlet", dirichlet=0.6, exhausted="exact", size_sigma=0.0)
# Of 50,000 images, ten classes in turn, 100 clients: any other machine or numpy must give the same.
FIRST_OF_SEED_20 = [12227, 45486, 41919, 49437, 38906]
SUM_OF_SEED_20 = "eb1b345f68d29e96"


class Script:
    """A random stream with given draws."""

    def __init__(self, clients: list[int], uniforms: list[float]) -> None:
        self.clients, self.uniforms = iter(clients), iter(uniforms)

    def randint(self, high: int) -> int:
        return next(self.clients)

    def uniform(self) -> float:
        return next(self.uniforms)


def test_refill_followed_by_hand():
    # client 0: 0.7 -> class 1 -> image 21, at the client's last place
    # client 1: 0.9 -> 11; 0.3 -> 10; 0.4 -> class 0 is empty: filled up, drawn again 0.2 -> 11
    # client 1 is full: skipped; client 0: 0.1 -> class 0 -> 10
    random = Script([0, 1, 1, 1, 1, 0], [0.7, 0.9, 0.3, 0.4, 0.2, 0.1])
    priors = np.array([[0.5, 0.5], [1.0, 0.0]])
    owned = fill(random, priors, np.array([2, 3]), [np.array([10, 11]), np.array([20, 21])], exact=False)
    assert [part.tolist() for part in owned] == [[10, 21], [11, 10, 11]]


def test_exact_followed_by_hand():
    # client 1: 0.5 -> 11; 0.1 -> 10; 0.2 -> class 0 is empty: 0.7 among {class 1} -> 21
    # client 0: 0.2 -> class 0 is empty: 0.9 among {class 1} -> 20
    random = Script([1, 1, 1, 0], [0.5, 0.1, 0.2, 0.7, 0.2, 0.9])
    priors = np.array([[0.5, 0.5], [0.9, 0.1]])
    owned = fill(random, priors, np.array([1, 3]), [np.array([10, 11]), np.array([20, 21])], exact=True)
    assert [part.tolist() for part in owned] == [[20], [21, 10, 11]]


def test_exact_refuses_a_prior_without_stock():
    random = Script([0, 0], [0.5, 0.5, 0.5])
    with pytest.raises(UserError, match=r"client 0 .* cannot be met exactly"):
        fill(random, np.array([[1.0, 0.0]]), np.array([2]), [np.array([10]), np.array([20])], exact=True)


def test_refill_equals_an_independent_version():
    owned = partition(REFILL, LABELS, 10, 20, seed=20)
    random = np.random.RandomState(20)
    shuffled = random.permutation(6000).tolist()
    priors = random.dirichlet([0.6] * 10, size=20)
    piles = {c: [i for i in shuffled if i % 10 == c] for c in range(10)}
    unused = {c: list(pile) for c, pile in piles.items()}
    expected: list[list[int]] = [[] for _ in range(20)]
    while any(len(mine) < 300 for mine in expected):
        client = random.randint(20)
        if len(expected[client]) == 300:
            continue
        while not unused[c := bisect.bisect_left(np.cumsum(priors[client]).tolist(), random.uniform())]:
            unused[c] = list(piles[c])
        expected[client].insert(0, unused[c].pop())
    assert [part.tolist() for part in owned] == expected


def test_the_stream_is_frozen():
    owned = np.concatenate(partition(REFILL, np.arange(50_000) % 10, 10, 100, seed=20))
    assert owned[:5].tolist() == FIRST_OF_SEED_20
    assert hashlib.sha256(owned.astype("<i8").tobytes()).hexdigest()[:16] == SUM_OF_SEED_20


@pytest.mark.parametrize("rule", [REFILL, EXACT])
def test_label_mix_follows_the_priors(rule):
    owned = partition(rule, LABELS, 10, 12, seed=3)
    random = np.random.RandomState(3)
    random.permutation(6000)
    priors = random.dirichlet([0.6] * 10, size=12)
    mix = np.array([np.bincount(LABELS[part], minlength=10) / 500 for part in owned])
    distance = np.abs(mix - priors).sum(axis=1) / 2
    assert [len(part) for part in owned] == [500] * 12
    # 500 draws from ten classes differ from their prior by about 0.05; a true partition must give some of it up.
    assert np.median(distance) < (0.08 if rule is REFILL else 0.2)


def test_exact_uses_every_image_once():
    owned = np.concatenate(partition(EXACT, LABELS, 10, 12, seed=20))
    assert np.array_equal(np.sort(owned), np.arange(6000))


def test_refill_repeats_only_what_ran_out():
    owned = np.concatenate(partition(REFILL, LABELS, 10, 12, seed=20))
    taken = np.bincount(owned, minlength=6000)
    for label in range(10):
        of_class = taken[label::10]
        assert of_class.max() - of_class.min() <= 1


def test_iid():
    owned = partition(Rule("iid", size_sigma=0.0), LABELS, 10, 7, seed=1)
    assert [len(part) for part in owned] == [857] * 7
    together = np.concatenate(owned)
    assert len(np.unique(together)) == len(together)
    assert all(np.abs(np.bincount(LABELS[part]) - 85.7).max() < 40 for part in owned)


@pytest.mark.parametrize(("per_client", "clients"), [(1, 10), (2, 20), (5, 30), (10, 6)])
def test_pathological(per_client, clients):
    rule = Rule("pathological", exhausted="exact", classes_per_client=per_client, size_sigma=0.0)
    owned = partition(rule, LABELS, 10, clients, seed=20)
    assert all(len(np.unique(LABELS[part])) == per_client for part in owned)
    assert [len(part) for part in owned] == [6000 // clients] * clients
    assert np.array_equal(np.sort(np.concatenate(owned)), np.arange(6000))


def test_pathological_dealt_by_hand():
    quotas, pools = np.array([[2, 0], [1, 1]]), [np.array([5, 6]), np.array([7])]
    assert [part.tolist() for part in deal(quotas, pools, exact=False)] == [[5, 6], [5, 7]]
    with pytest.raises(UserError, match="class 0 has 2 examples and its clients want 3"):
        deal(quotas, pools, exact=True)


def test_pathological_refuses_too_many_classes():
    with pytest.raises(UserError, match="got 11 of 10 classes"):
        pathological_quotas(np.random.RandomState(0), np.array([50]), np.full(10, 9), 11)
    with pytest.raises(UserError, match="client of 3 examples"):
        pathological_quotas(np.random.RandomState(0), np.array([3]), np.full(10, 9), 4)


@pytest.mark.parametrize(("images", "clients", "sigma"), [(6000, 10, 1.0), (1000, 900, 2.0), (50, 50, 3.0)])
def test_unequal_sizes(images, clients, sigma):
    sizes = client_sizes(np.random.RandomState(20), images, clients, sigma)
    assert sizes.sum() == images
    assert sizes.min() >= 1
    if images > clients:
        assert sizes.max() > 1.5 * images / clients


@pytest.mark.parametrize("kind", ["dirichlet", "iid", "pathological"])
def test_unequal_sizes_are_met(kind):
    rule = Rule(kind, dirichlet=0.6, exhausted="refill", classes_per_client=2, size_sigma=0.4)
    owned = partition(rule, LABELS, 10, 12, seed=20)
    random = np.random.RandomState(20)
    random.permutation(6000)
    assert [len(part) for part in owned] == client_sizes(random, 6000, 12, 0.4).tolist()


def test_natural():
    owned = natural(np.array(["mia", "ben", "mia", "zoe", "ben", "ben"]))
    assert [part.tolist() for part in owned] == [[1, 4, 5], [0, 2], [3]]
    with pytest.raises(UserError, match="no owners"):
        natural(None)


def test_more_clients_than_images():
    with pytest.raises(UserError, match="7 clients for 6 training examples"):
        partition(REFILL, np.arange(6) % 2, 2, 7, seed=20)


def test_priors_too_narrow_to_draw():
    with pytest.raises(UserError, match="too small to draw"):
        partition(Rule("dirichlet", dirichlet=1e-5, exhausted="refill"), LABELS, 10, 5, seed=20)
