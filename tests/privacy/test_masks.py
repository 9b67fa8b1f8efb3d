"""Masks: they cancel in the sum, only there, and no stream is used twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from pretend_world import on_ranks

from fedlada_mpi.privacy import masks as masks_module
from fedlada_mpi.privacy.agreement import AES, CHACHA, Epoch, agree
from fedlada_mpi.privacy.masks import Masks, add_streams, received_digest
from fedlada_mpi.settings import Config

SIZE = 1000
X = torch.arange(7, dtype=torch.float32)


def made(received=lambda rank: X, gpu=False, neighbours="all", number=1):
    """The rows of a server and four silos."""

    def action(world):
        name = f"silo_{world.rank}" if world.rank else ""
        masks = Masks(agree(world, Config(secure=True, secure_neighbours=neighbours), name, gpu))
        rows = torch.full((2, SIZE), 5, dtype=torch.int64)
        masks.start("round", number, rows, [received(world.rank)])
        masks.ready()
        return rows

    return on_ranks(5, action)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("neighbours", ["2", "all"])
def test_they_cancel_in_the_sum(gpu, neighbours):
    rows = made(gpu=gpu, neighbours=neighbours)
    assert not rows[0].any()
    assert not sum(rows).any()
    for mask in rows[1:]:
        assert len(torch.unique(mask)) == 2 * SIZE  # rows do not repeat each other
        ones = np.unpackbits(mask.numpy().view(np.uint8)).mean()
        assert abs(ones - 0.5) < 0.01


def test_without_masks_the_rows_are_zero():
    assert not any(rows.any() for rows in made(neighbours="0"))


def test_silos_that_got_another_model_have_other_masks():
    rows = made(received=lambda rank: X + (rank == 3) * 1e-6)
    assert (sum(rows) != 0).sum() > 1.9 * SIZE


def test_streams_are_those_of_the_ciphers():
    key, words = bytes(range(32)), np.zeros(masks_module.BLOCK + 3, np.int64)
    for cipher, reference in (
        (AES, Cipher(algorithms.AES(key), modes.CTR(bytes(16)))),
        (CHACHA, Cipher(algorithms.ChaCha20(key, bytes(16)), None)),
    ):
        words[:] = 0
        add_streams(words, [(key, 1)], cipher)
        expected = np.frombuffer(reference.encryptor().update(bytes(words.nbytes)), "<i8")
        assert (words == expected).all()
        add_streams(words, [(key, -1)], cipher)
        assert not words.any()


def test_no_masks_are_used_twice():
    def action(world):
        masks = Masks(agree(world, Config(secure=True), f"silo_{world.rank}" if world.rank else "", False))
        rows = torch.zeros(1, 3, dtype=torch.int64)
        masks.start("round", 1, rows, [X])
        masks.ready()
        with pytest.raises(RuntimeError, match="masks of round 1 have been used"):
            masks.start("round", 1, rows, [X])
        first, second = np.zeros(2, np.int64), np.zeros(2, np.int64)
        masks.words(first, [X])
        masks.words(second, [X])
        return np.array([first, second]), world.reduce_words(first), world.reduce_words(second)

    results = on_ranks(4, action)
    for words, *_ in results[1:]:
        assert not (words[0] == words[1]).any()
    assert not np.any(results[0][1:])


def test_what_fails_in_the_thread_is_raised(monkeypatch):
    masks = Masks(Epoch(("a", "b", "c"), "a", AES, False, 1, {"b": bytes(32)}))
    monkeypatch.setattr(masks_module, "received_digest", lambda *_: 1 / 0)
    masks.start("round", 1, torch.zeros(1, 3, dtype=torch.int64), [X])
    with pytest.raises(ZeroDivisionError):
        masks.ready()


def test_the_digest_is_of_bits():
    assert received_digest([X]) == received_digest([X.clone()])
    others = [[X, X], [X[:6]], [-X], [X.double()], []]
    assert len({received_digest(vectors) for vectors in [[X], *others]}) == 6
    assert received_digest([X], {"lr": 0.1}) != received_digest([X], {"lr": 0.2})
