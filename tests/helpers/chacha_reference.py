"""ChaCha20 in numpy, from the text of RFC 8439: where a GPU is, the library that has it may be missing."""

from __future__ import annotations

import numpy as np

_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")
_QUARTERS = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
             (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]  # fmt: skip


def _rotated(words: np.ndarray, bits: int) -> np.ndarray:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def keystream(key: bytes, blocks: int, first: int = 0) -> bytes:
    """Blocks of 64 bytes with a nonce of 0, from block ``first`` on."""
    start = np.zeros((16, blocks), np.uint32)
    start[:4], start[4:12] = _CONSTANTS[:, None], np.frombuffer(key, "<u4")[:, None]
    start[12] = np.arange(first, first + blocks, dtype=np.uint64).astype(np.uint32)
    x = start.copy()
    for _ in range(10):
        for a, b, c, d in _QUARTERS:
            for i, j, k, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[i] += x[j]
                x[k] = _rotated(x[k] ^ x[i], bits)
    return (x + start).astype("<u4").T.tobytes()


def words(key: bytes, length: int, first_block: int = 0) -> np.ndarray:
    """The stream as little-endian words of 64 bits."""
    return np.frombuffer(keystream(key, -(-length // 8), first_block), "<u8")[:length]
