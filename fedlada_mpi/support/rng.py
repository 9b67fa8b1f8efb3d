"""Randomness as a function of (seed, purpose, round, client), never of rank, order or history.

Philox is counter-based: its key is (seed, purpose) and its counter starts at (round, client), so any rank
draws any client's numbers without drawing another's. Only raw bits are used, which are the same in every
version of numpy and on every machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

SAMPLE, SHUFFLE, AUGMENT, LAYERS, FULL_GRADIENT, COIN, DIAGNOSE, CLIENT_HOOKS, SERVER_HOOKS, ADAPTERS = range(10)


def bits(count: int, seed: int, purpose: int, t: int, client: int = 0) -> np.ndarray:
    """``count`` independent uint64."""
    return np.random.Philox(key=[seed, purpose], counter=[0, t, client, 0]).random_raw(count)


def permutations(n: int, count: int, seed: int, t: int, client: int) -> np.ndarray:
    """``count`` permutations of n, [count, n]."""
    keys = bits(count * n, seed, SHUFFLE, t, client).reshape(count, n)
    return np.argsort(keys, axis=1, kind="stable")


def fixed_number(clients: int, share: float) -> int:
    """S, with halves rounded up."""
    return int(share * clients + 0.5)


def participants(clients: int, share: float, sampling: str, seed: int, t: int) -> np.ndarray:
    """S^t, ascending."""
    keys = bits(clients, seed, SAMPLE, t)
    if sampling == "bernoulli":
        return np.flatnonzero(keys.astype(np.float64) < share * 2.0**64)
    return np.sort(np.argsort(keys, kind="stable")[: fixed_number(clients, share)])


def chosen(n: int, share: float, seed: int, client: int) -> np.ndarray:
    """A share of a client's n images, at least one, the same in every round; ascending."""
    order = np.argsort(bits(n, seed, DIAGNOSE, 0, client), kind="stable")
    return np.sort(order[: max(1, int(share * n + 0.5))])


_torch = threading.RLock()


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generators for users' code that draws from them; restored after the block.

    They are shared by all threads, so other threads wait to enter a block of their own.
    """
    import torch

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with _torch, torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        yield
