"""ChaCha20 (RFC 8439) keystreams, added to integers on the GPU: the masks of secure sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .triton_support import await_inputs, jit, tl, triton

KEY_BYTES = 32
BLOCK_WORDS = 8  # 64-bit words of a ChaCha20 block
MAX_BLOCKS = 2**32  # of a key and nonce, whose block counter has 32 bits
LANES = 128  # blocks per program, one for each thread


@jit
def _quarter(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@jit
def _word(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@jit
def _key_word(key, i: tl.constexpr):
    return tl.load(key + i).to(tl.uint32, bitcast=True)


@jit(do_not_specialize=["length", "first_block", "count"])
def _add_streams(vector, keys, signs, length, first_block, count, LANES: tl.constexpr):
    await_inputs()
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.uint32)
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s12 = (block + first_block).to(tl.uint32)
    none = tl.zeros([LANES], tl.uint64)
    t0, t1, t2, t3, t4, t5, t6, t7 = none, none, none, none, none, none, none, none
    for i in range(count):
        key = keys + i * 8
        s4, s5 = zero + _key_word(key, 0), zero + _key_word(key, 1)
        s6, s7 = zero + _key_word(key, 2), zero + _key_word(key, 3)
        s8, s9 = zero + _key_word(key, 4), zero + _key_word(key, 5)
        s10, s11 = zero + _key_word(key, 6), zero + _key_word(key, 7)
        x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
        x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, zero, zero, zero
        for _ in range(10):
            x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
            x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
            x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
            x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
            x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
            x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
            x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
            x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
        # Two's complement: all ones turn + v into - v - 1, and 1 more makes it - v.
        flip = tl.load(signs + i).to(tl.uint64, bitcast=True)
        t0 += (_word(x0 + s0, x1 + s1) ^ flip) - flip
        t1 += (_word(x2 + s2, x3 + s3) ^ flip) - flip
        t2 += (_word(x4 + s4, x5 + s5) ^ flip) - flip
        t3 += (_word(x6 + s6, x7 + s7) ^ flip) - flip
        t4 += (_word(x8 + s8, x9 + s9) ^ flip) - flip
        t5 += (_word(x10 + s10, x11 + s11) ^ flip) - flip
        t6 += (_word(x12 + s12, x13) ^ flip) - flip
        t7 += (_word(x14, x15) ^ flip) - flip
    even, odd = tl.join(tl.join(t0, t4), tl.join(t2, t6)), tl.join(tl.join(t1, t5), tl.join(t3, t7))
    total = tl.reshape(tl.join(even, odd), [LANES, 8]).to(tl.int64, bitcast=True)
    at = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < length
    tl.store(vector + at, tl.load(vector + at, mask=inside, other=0) + total, mask=inside)


def add_streams(vector: Tensor, keys: Sequence[bytes], signs: Sequence[int], first_block: int = 0) -> None:
    """Add the keystream of each key (sign 1), or subtract it (-1), to 64-bit integers, modulo 2^64 and in place.

    A stream's bytes are little-endian words, and start at its block ``first_block``; the nonce is 0, because a key is
    used once. The vector is read and written once, whatever the number of keys.
    """
    if vector.dtype != torch.int64 or vector.dim() != 1 or not vector.is_contiguous():
        raise TypeError(f"streams: got {vector.dtype} {tuple(vector.shape)}, expected a contiguous vector of int64")
    if len(keys) != len(signs) or not {*signs} <= {1, -1}:
        raise ValueError(f"streams: got {len(keys)} keys and the signs {[*signs]}, expected 1 or -1 for each key")
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"streams: got keys of {[*map(len, keys)]} bytes, expected {KEY_BYTES}")
    blocks = triton.cdiv(vector.numel(), BLOCK_WORDS)
    if first_block < 0 or first_block + blocks > MAX_BLOCKS:
        raise ValueError(f"streams: got blocks {first_block} to {first_block + blocks}, expected 0 to {MAX_BLOCKS}")
    if not keys or not blocks:
        return
    words = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.int32).to(vector.device)
    flips = torch.tensor([-(sign < 0) for sign in signs], dtype=torch.int64).to(vector.device)
    grid = (triton.cdiv(blocks, LANES),)
    _add_streams[grid](vector, words, flips, vector.numel(), first_block, len(keys), LANES)
