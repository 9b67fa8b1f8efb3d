"""The assignment of images to clients: one array of image indices per client.

All draws come from ``np.random.RandomState``, whose stream numpy keeps frozen, so that a seed
gives the same partition everywhere. With ``dirichlet``, equal sizes and ``refill`` the draws are
made in the order of the authors' public simulator: a permutation of the images, the priors, then
client, class, client, class, ...
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..settings import SETTINGS
from ..support.errors import UserError

KINDS = SETTINGS["partition"].choices
# Settings that only some partitions have.
USED_BY = {
    "dirichlet": ("dirichlet",),
    "exhausted": ("dirichlet", "pathological"),
    "classes_per_client": ("pathological",),
    "size_sigma": ("dirichlet", "iid", "pathological"),
}


@dataclass(frozen=True)
class Rule:
    """How images are assigned; settings that ``kind`` does not use are None."""

    kind: str
    dirichlet: float | None = None
    exhausted: str | None = None
    classes_per_client: int | None = None
    size_sigma: float | None = None


def partition(
    rule: Rule, labels: np.ndarray, classes: int, clients: int, seed: int, owners: np.ndarray | None = None
) -> list[np.ndarray]:
    """The images of each client, in the order in which they are stored."""
    if rule.kind == "natural":
        return natural(owners)
    if clients > len(labels):
        raise UserError(
            f"--clients: got {clients} clients for {len(labels)} training examples, expected at most {len(labels)}"
        )
    random = np.random.RandomState(seed)
    order = random.permutation(len(labels))
    sizes = client_sizes(random, len(labels), clients, rule.size_sigma or 0.0)
    if rule.kind == "iid":
        return np.split(order, np.cumsum(sizes))[:clients]
    pools = [order[labels[order] == c] for c in range(classes)]
    if rule.kind == "dirichlet":
        assert rule.dirichlet is not None
        priors = random.dirichlet([rule.dirichlet] * classes, size=clients)
        if not np.isfinite(priors).all():
            raise UserError(
                f"--dirichlet: got {rule.dirichlet}, too small to draw label priors from: expected about 0.01 or more"
            )
        return fill(random, priors, sizes, pools, exact=rule.exhausted == "exact")
    assert rule.classes_per_client is not None
    quotas = pathological_quotas(random, sizes, np.array([len(pool) for pool in pools]), rule.classes_per_client)
    return deal(quotas, pools, exact=rule.exhausted == "exact")


def hold_out(share: float, labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The training images that stay, and those held out for validation: so many of each class, to within one.

    Drawn apart from the partition: ``share`` 0 leaves that as it is.
    """
    number = round(share * len(labels))
    if not share:
        return np.arange(len(labels)), np.arange(0)
    order = np.random.RandomState([seed, 1]).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # Every so many of all images, sorted by class; each class in random order.
    held = np.sort(order[np.arange(number) * len(labels) // max(number, 1)])
    kept = np.setdiff1d(np.arange(len(labels)), held)
    if not number:
        raise UserError(f"--validation: got {share:g} of {len(labels)} training examples, which is none: give more")
    if missing := set(np.unique(labels).tolist()) - set(np.unique(labels[kept]).tolist()):
        raise UserError(
            f"--validation: got {share:g}, which leaves no training example of class or stratum {min(missing)}: "
            "give less"
        )
    return kept, held


def strata(values: np.ndarray, bins: int) -> np.ndarray:
    """The quantile bin of each number, from 0; fewer bins where many numbers are equal."""
    edges = np.unique(np.quantile(values, np.arange(1, bins) / bins))
    return np.unique(np.searchsorted(edges, values, side="right"), return_inverse=True)[1].reshape(-1)


def client_sizes(random: np.random.RandomState, images: int, clients: int, sigma: float) -> np.ndarray:
    """Images per client: all ``images // clients``, or lognormal and summing to ``images``."""
    equal = np.full(clients, images // clients, dtype=np.int64)
    if sigma == 0:
        return equal
    weights = random.lognormal(mean=0.0, sigma=sigma, size=clients)
    sizes = np.maximum((weights / weights.sum() * images).astype(np.int64), 1)
    # Rounding, and at least one image each, leave a small difference: the largest client absorbs it.
    while (difference := images - int(sizes.sum())) != 0:
        largest = int(np.argmax(sizes))
        sizes[largest] += difference if difference > 0 else -min(-difference, int(sizes[largest]) // 2)
    return sizes


def fill(
    random: np.random.RandomState, priors: np.ndarray, sizes: np.ndarray, pools: list[np.ndarray], exact: bool
) -> list[np.ndarray]:
    """Assign images one by one: a client with room, a class drawn from its prior, the last unused image of that class.

    If the class has run out, its images are made available again and the class is redrawn (images may
    then repeat); with ``exact``, the class is redrawn among those in stock (no image is used twice).
    """
    cumulative = np.cumsum(priors, axis=1)
    stock = np.array([len(pool) for pool in pools])
    room = sizes.copy()
    owned = [np.empty(size, dtype=np.int64) for size in sizes]
    left = int(room.sum())
    while left:
        client = random.randint(len(room))
        if room[client] == 0:
            continue
        room[client] -= 1
        left -= 1
        # argmax is the first class whose cumulative prior reaches the draw.
        label = int(np.argmax(random.uniform() <= cumulative[client]))
        while stock[label] == 0:
            if exact:
                label = draw_in_stock(random, priors[client], stock, client)
            else:
                stock[label] = len(pools[label])
                label = int(np.argmax(random.uniform() <= cumulative[client]))
        stock[label] -= 1
        owned[client][room[client]] = pools[label][stock[label]]
    return owned


def draw_in_stock(random: np.random.RandomState, prior: np.ndarray, stock: np.ndarray, client: int) -> int:
    """A class from the client's prior, among those with unused images."""
    wanted = np.where(stock > 0, prior, 0.0)
    if wanted.sum() == 0:
        raise UserError(
            f"client {client} needs classes whose examples are all used up, so its prior cannot be met exactly: "
            "use --exhausted refill or a larger --dirichlet"
        )
    cumulative = np.cumsum(wanted / wanted.max())
    # Scaled by the total, the draw stays below it, so that a class out of stock is never chosen.
    return int(np.argmax(random.uniform() * cumulative[-1] < cumulative))


def pathological_quotas(
    random: np.random.RandomState, sizes: np.ndarray, stock: np.ndarray, per_client: int
) -> np.ndarray:
    """Images [client, class]: ``per_client`` distinct classes each, in equal parts, all classes used evenly."""
    classes = len(stock)
    if per_client > classes:
        raise UserError(f"--classes-per-client: got {per_client} of {classes} classes, expected at most {classes}")
    if per_client > sizes.min():
        raise UserError(
            f"--classes-per-client: got {per_client} classes for a client of {sizes.min()} examples, "
            f"expected at most {sizes.min()}"
        )
    assigned = np.zeros(classes, dtype=np.int64)
    quotas = np.zeros((len(sizes), classes), dtype=np.int64)
    for client, size in enumerate(sizes):
        # The classes with the smallest fraction assigned so far, ties at random; the first of them give one image more.
        chosen = np.lexsort((random.uniform(size=classes), assigned / stock))[:per_client]
        quotas[client, chosen] = size // per_client
        quotas[client, chosen[: size % per_client]] += 1
        assigned += quotas[client]
    return quotas


def deal(quotas: np.ndarray, pools: list[np.ndarray], exact: bool) -> list[np.ndarray]:
    """Assign each class's images in order; a class that runs out starts over, or, with ``exact``, is an error."""
    wanted = quotas.sum(axis=0)
    for label, pool in enumerate(pools):
        if exact and wanted[label] > len(pool):
            raise UserError(
                f"class {label} has {len(pool)} examples and its clients want {wanted[label]}, so the class prior "
                "cannot be met exactly: use --exhausted refill, or other --clients or --classes-per-client"
            )
    ends = np.cumsum(quotas, axis=0)
    owned = []
    for quota, end in zip(quotas, ends, strict=True):
        parts = [pools[c][np.arange(end[c] - quota[c], end[c]) % len(pools[c])] for c in np.flatnonzero(quota)]
        owned.append(np.concatenate(parts))
    return owned


def natural(owners: np.ndarray | None) -> list[np.ndarray]:
    """The data's own groups, ordered by the owner's number or name."""
    if owners is None:
        raise UserError(
            "--partition natural: no owners in the data, expected a train_clients array in the .npz, "
            "train/CLIENT/CLASS/ folders or --client COLUMN; use --partition dirichlet or iid otherwise"
        )
    _, inverse = np.unique(owners, return_inverse=True)
    return np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse)))[:-1]
