"""ChaCha20 streams on the GPU against RFC 8439 and a reference in numpy, on a CUDA device or in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chacha_reference import words as words_of
from kernel_checks import CUDA, DEVICE, kernels_run

from fedlada_mpi.gpu.chacha_kernels import BLOCK_WORDS, LANES, MAX_BLOCKS, add_streams

PROGRAM = LANES * BLOCK_WORDS
KEYS = [bytes((31 * i + 7 * j) % 256 for j in range(32)) for i in range(3)]

# RFC 8439, appendix A.1, test vectors 1 to 4, whose nonce is 0: key, block, and how the block begins.
RFC_8439 = [
    ("00" * 32, 0, "76b8e0ada0f13d90405d6ae55386bd28"),
    ("00" * 32, 1, "9f07e7be5551387a98ba977c732d080d"),
    ("00" * 31 + "01", 1, "3aeb5224ecf849929b9d828db1ced4dd"),
    ("00ff" + "00" * 30, 2, "72d54dfbf12ec44b362692df94137f32"),
]


def added(vector: np.ndarray, keys: list[bytes], signs: list[int], first_block: int = 0) -> np.ndarray:
    on_device = torch.from_numpy(vector.view(np.int64).copy()).to(DEVICE)
    add_streams(on_device, keys, signs, first_block)
    return on_device.cpu().numpy().view(np.uint64)


def start(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 2**64, length, np.uint64, endpoint=False)


@kernels_run
@pytest.mark.parametrize(("key", "block", "begin"), RFC_8439)
def test_blocks_of_the_rfc(key, block, begin):
    stream = added(np.zeros(BLOCK_WORDS, np.uint64), [bytes.fromhex(key)], [1], block)
    assert stream.astype("<u8").tobytes().hex().startswith(begin)


@pytest.mark.parametrize(("key", "block", "begin"), RFC_8439)
def test_the_reference(key, block, begin):
    assert words_of(bytes.fromhex(key), BLOCK_WORDS, block).tobytes().hex().startswith(begin)


def test_the_reference_is_the_librarys():
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    for key, first in zip(KEYS, (0, 5, 2**32 - 4), strict=True):
        nonce = first.to_bytes(4, "little") + bytes(12)
        stream = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(8 * 29))
        assert words_of(key, 29, first).tobytes() == stream


@kernels_run
@pytest.mark.parametrize("length", [1, 7, 8, 9, PROGRAM - 1, PROGRAM, PROGRAM + 13])
def test_of_any_length(length):
    assert np.array_equal(added(start(length), KEYS[:1], [1]), start(length) + words_of(KEYS[0], length))


@kernels_run
def test_several_neighbours_in_one_pass():
    expected = start(77) + words_of(KEYS[0], 77, 5) - words_of(KEYS[1], 77, 5) - words_of(KEYS[2], 77, 5)
    assert np.array_equal(added(start(77), KEYS, [1, -1, -1], 5), expected)


@kernels_run
def test_masks_of_a_pair_cancel():
    masked = added(start(77), KEYS, [1, 1, -1])
    assert not np.any(masked == start(77))
    assert np.array_equal(added(masked, KEYS, [-1, -1, 1]), start(77))


@kernels_run
def test_pieces_of_a_vector_continue_its_stream():
    whole, first = added(start(200), KEYS, [1, -1, 1]), 8 * BLOCK_WORDS
    pieces = [
        added(start(200)[:first], KEYS, [1, -1, 1]),
        added(start(200)[first:], KEYS, [1, -1, 1], first // BLOCK_WORDS),
    ]
    assert np.array_equal(np.concatenate(pieces), whole)


@kernels_run
def test_the_last_blocks_of_a_stream():
    """Counters above 2^31 are not negative; what is behind the last one would start the stream anew."""
    for first in (2**31 - 1, MAX_BLOCKS - 2):
        assert np.array_equal(added(start(16), KEYS[:1], [1], first), start(16) + words_of(KEYS[0], 16, first))
    with pytest.raises(ValueError, match="expected 0 to 4294967296"):
        added(start(17), KEYS[:1], [1], MAX_BLOCKS - 2)


@kernels_run
def test_nothing_to_add():
    assert np.array_equal(added(start(9), [], []), start(9))
    assert added(start(0), KEYS, [1, 1, 1]).size == 0


@pytest.mark.skipif(not CUDA, reason="takes a GPU")
def test_a_vector_beyond_4_gib():
    """Offsets into it take more than 32 bits."""
    length = 2**29 + 5
    vector = torch.zeros(length, dtype=torch.int64, device="cuda")
    add_streams(vector, KEYS[:1], [1], 3)
    blocks = length // BLOCK_WORDS
    for block in (0, blocks // 2, blocks):
        part = vector[BLOCK_WORDS * block : BLOCK_WORDS * (block + 1)].cpu().numpy().view(np.uint64)
        assert np.array_equal(part, words_of(KEYS[0], len(part), 3 + block))


@pytest.mark.skipif(not CUDA, reason="takes a GPU")
def test_a_network_of_today_on_the_side_stream():
    """All words of a vector of ResNet-18, for nine neighbours, made while the current stream is busy."""
    from fedlada_mpi.gpu.side_stream import SideStream

    length, keys, signs = 11_173_962, [bytes([i]) * 32 for i in range(9)], [1, -1, 1, 1, -1, 1, -1, -1, 1]
    expected = np.zeros(length, np.uint64)
    for key, sign in zip(keys, signs, strict=True):
        expected += words_of(key, length) if sign > 0 else -words_of(key, length)
    vector, busy = torch.zeros(length, dtype=torch.int64, device="cuda"), torch.randn(4096, 4096, device="cuda")
    side = SideStream("cuda")
    side.submit(lambda: add_streams(vector, keys, signs), vector)
    busy @= busy
    side.join()
    assert np.array_equal(vector.cpu().numpy().view(np.uint64), expected)


@pytest.mark.parametrize(
    ("vector", "keys", "signs", "error"),
    [
        (torch.zeros(8), KEYS[:1], [1], "got torch.float32"),
        (torch.zeros(2, 8, dtype=torch.int64), KEYS[:1], [1], "expected a contiguous vector"),
        (torch.zeros(16, dtype=torch.int64)[::2], KEYS[:1], [1], "expected a contiguous vector"),
        (torch.zeros(8, dtype=torch.int64), KEYS[:2], [1], "expected 1 or -1 for each key"),
        (torch.zeros(8, dtype=torch.int64), KEYS[:1], [0], "expected 1 or -1 for each key"),
        (torch.zeros(8, dtype=torch.int64), [b"short"], [1], "bytes, expected 32"),
    ],
)
def test_refuses_what_would_mask_wrongly(vector, keys, signs, error):
    with pytest.raises((TypeError, ValueError), match=error):
        add_streams(vector, keys, signs)
