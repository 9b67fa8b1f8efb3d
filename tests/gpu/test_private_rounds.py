"""Masks and rounds with ``--secure`` and ``--dp`` on a GPU against the CPU, without a library of ciphers.

Masks are made by the kernels, in the interpreter where there is no GPU; whole rounds take a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chacha_reference import words
from kernel_checks import CUDA, DEVICE, kernels_run
from training_runs import make_data, run_here

from fedlada_mpi.privacy import masks as masks_module
from fedlada_mpi.privacy.agreement import CHACHA, Epoch
from fedlada_mpi.privacy.grid import PublicGrid
from fedlada_mpi.privacy.masks import Masks, received_digest
from fedlada_mpi.rounds.aggregate import private

on_gpu = pytest.mark.skipif(not CUDA, reason="takes a GPU")
NAMES = ("a", "b", "c")
PAIRS = {frozenset(pair): bytes([i + 1]) * 32 for i, pair in enumerate(("ab", "ac", "bc"))}
X = torch.linspace(-1, 1, 700)
SIZES = [3, 9, 5, 7]


def epoch(own: str) -> Epoch:
    return Epoch(NAMES, own, CHACHA, False, 2, {o: PAIRS[frozenset((own, o))] for o in NAMES if o != own})


def digest(number: int) -> bytes:
    """Of messages 1 to ``number``, each of which has received the same."""
    received = b""
    for _ in range(number):
        received = received_digest([received, X])
    return received_digest([received], "")


def expected(own: str, rows: int, size: int, number: int = 1) -> np.ndarray:
    """The masks of a silo, by the reference."""
    total = np.zeros((rows, size), np.uint64)
    for i in range(rows):
        for key, sign in epoch(own).streams(f"round {i}", number, digest(number)):
            stream = words(key, size)
            total[i] += stream if sign > 0 else -stream
    return total


@pytest.fixture
def with_kernels(monkeypatch):
    """In the interpreter, too."""
    monkeypatch.setattr(masks_module, "_has_kernels", lambda rows: True)


@kernels_run
def test_masks_of_the_kernels(with_kernels):
    """They are the reference's, cancel in the sum, and stay below what clients send, added after them."""
    sent, grid, values = {}, PublicGrid(16, 8), torch.linspace(-3, 3, 301, device=DEVICE)
    for own in NAMES:
        masks, rows = Masks(epoch(own)), torch.full((2, 301), 7, dtype=torch.int64, device=DEVICE)
        masks.start("round", 1, rows, [X.to(DEVICE)])
        masks.ready()
        assert np.array_equal(rows.cpu().numpy().view(np.uint64), expected(own, 2, 301))
        grid.add(rows[1], values, 2.0)
        sent[own] = rows.cpu()
    total, plain = sum(sent.values()), torch.zeros(301, dtype=torch.int64)
    for _ in NAMES:
        grid.add(plain, values.cpu(), 2.0)
    assert not total[0].any()
    assert torch.equal(total[1], plain)


@on_gpu
def test_masks_are_made_beside_the_training():
    """Rows of a network of today, again and again, while the current stream is busy before and after."""
    size, masks = 11_173_962, Masks(epoch("b"))
    rows = torch.zeros(1, size, dtype=torch.int64, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for number in (1, 2, 3):
        busy @= busy / busy.norm()
        rows.add_(5)  # of the last round, before it is overwritten
        masks.start("round", number, rows, [X.cuda()])
        torch.empty(size, device="cuda").normal_()  # memory that is free for others meanwhile
        busy @= busy / busy.norm()
        masks.ready()
        rows[0, :10] += 1
        found = rows[0].cpu().numpy().view(np.uint64)
        found[:10] -= np.uint64(1)
        assert np.array_equal(found[: 1 << 16], expected("b", 1, 1 << 16, number)[0])
        last = words_at_the_end("b", size, number)
        assert np.array_equal(found[-len(last) :], last)


def words_at_the_end(own: str, size: int, number: int) -> np.ndarray:
    first = size // 8 - 100
    total = np.zeros(size - 8 * first, np.uint64)
    for key, sign in epoch(own).streams("round 0", number, digest(number)):
        stream = words(key, len(total), first)
        total += stream if sign > 0 else -stream
    return total


class OnGpu(torch.Tensor):
    """As if it were."""

    is_cuda = property(lambda self: True)


def test_a_gpu_without_kernels_gets_masks_of_the_host(monkeypatch):
    pytest.importorskip("cryptography")
    monkeypatch.setattr(masks_module, "_has_kernels", lambda rows: False)
    masks, rows = Masks(epoch("c")), torch.full((2, 301), 7, dtype=torch.int64).as_subclass(OnGpu)
    masks.start("round", 1, rows, [X])
    assert not torch.any(rows)
    masks.ready()
    assert np.array_equal(rows.as_subclass(torch.Tensor).numpy().view(np.uint64), expected("c", 2, 301))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("private-rounds"), SIZES)


class Drawn(private.Noise):
    """The same numbers on every device, without a library."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(4)

    def normal(self, count: int) -> np.ndarray:
        return self.random.standard_normal(count)


COMMON = dict(rounds=2, local_steps=2, batch_size=4, lr=0.05, participation=1.0, precision="fp64")
DP = dict(dp="client", noise_multiplier=0.5, delta=1e-3, clip_norm=0.1, sampling="bernoulli")
SECURE = dict(secure=True, secure_neighbours=0)


@on_gpu
@pytest.mark.parametrize("method", ["fedavg", "fedlada", "scaffold"])
@pytest.mark.parametrize("settings", [SECURE, DP, {**SECURE, **DP}], ids=["secure", "dp", "both"])
def test_rounds_as_on_the_cpu(method, settings, data, tmp_path, monkeypatch):
    if "dp" in settings:
        pytest.importorskip("dp_accounting")
    monkeypatch.setattr(private, "Noise", Drawn)
    runs = {
        device: run_here(data, tmp_path / device, algorithm=method, device=device, **COMMON, **settings)
        for device in ("cpu", "cuda")
    }
    moved = np.linalg.norm(runs["cpu"].x - data.start)
    assert moved > 0
    assert np.linalg.norm(runs["cuda"].x - runs["cpu"].x) < 1e-5 * moved
