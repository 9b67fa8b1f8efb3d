"""SHA-256 (FIPS 180-4) of every piece of a vector on the GPU: digests come to the host, 64 times fewer bytes."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from .triton_support import await_inputs, jit, tl, triton

BLOCK = 64  # bytes that SHA-256 compresses at a time
LANES = 64  # pieces per program
DIGEST_WORDS = 8


@jit
def _rotated(x, COUNT: tl.constexpr):
    return (x >> COUNT) | (x << (32 - COUNT))


@jit
def _big_endian(x):
    return (x << 24) | ((x & 0xFF00) << 8) | ((x >> 8) & 0xFF00) | (x >> 24)


@jit
def _step(a, b, c, d, e, f, g, h, k, w):
    """A step's new e and a, which take the places of d and h; the others only change their names."""
    t = h + (_rotated(e, 6) ^ _rotated(e, 11) ^ _rotated(e, 25)) + ((e & f) ^ (~e & g)) + k + w
    return d + t, t + (_rotated(a, 2) ^ _rotated(a, 13) ^ _rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))


@jit
def _next(w0, w1, w9, w14):
    """The word of the message schedule 16 places behind w0."""
    low = _rotated(w1, 7) ^ _rotated(w1, 18) ^ (w1 >> 3)
    return w0 + low + w9 + (_rotated(w14, 17) ^ _rotated(w14, 19) ^ (w14 >> 10))


@jit
def _constant(table, i):
    return tl.load(table + i).to(tl.uint32, bitcast=True)


@jit
def _word(words, at, inside, padding, i: tl.constexpr, LENGTH: tl.constexpr):
    """Of a block of the message, or of the padding behind it: a bit, zeros, and the message's length in bits."""
    found = _big_endian(tl.load(words + at + i, mask=inside, other=0).to(tl.uint32, bitcast=True))
    if i == 0:
        found += padding << 31
    if i == 15:
        found += padding * LENGTH
    return found


@jit
def _compressed(h0, h1, h2, h3, h4, h5, h6, h7, words, at, inside, padding, table, LENGTH: tl.constexpr):
    w0, w1 = _word(words, at, inside, padding, 0, LENGTH), _word(words, at, inside, padding, 1, LENGTH)
    w2, w3 = _word(words, at, inside, padding, 2, LENGTH), _word(words, at, inside, padding, 3, LENGTH)
    w4, w5 = _word(words, at, inside, padding, 4, LENGTH), _word(words, at, inside, padding, 5, LENGTH)
    w6, w7 = _word(words, at, inside, padding, 6, LENGTH), _word(words, at, inside, padding, 7, LENGTH)
    w8, w9 = _word(words, at, inside, padding, 8, LENGTH), _word(words, at, inside, padding, 9, LENGTH)
    w10, w11 = _word(words, at, inside, padding, 10, LENGTH), _word(words, at, inside, padding, 11, LENGTH)
    w12, w13 = _word(words, at, inside, padding, 12, LENGTH), _word(words, at, inside, padding, 13, LENGTH)
    w14, w15 = _word(words, at, inside, padding, 14, LENGTH), _word(words, at, inside, padding, 15, LENGTH)
    a, b, c, d, e, f, g, h = h0, h1, h2, h3, h4, h5, h6, h7
    for r in range(0, 64, 16):
        d, h = _step(a, b, c, d, e, f, g, h, _constant(table, r), w0)
        c, g = _step(h, a, b, c, d, e, f, g, _constant(table, r + 1), w1)
        b, f = _step(g, h, a, b, c, d, e, f, _constant(table, r + 2), w2)
        a, e = _step(f, g, h, a, b, c, d, e, _constant(table, r + 3), w3)
        h, d = _step(e, f, g, h, a, b, c, d, _constant(table, r + 4), w4)
        g, c = _step(d, e, f, g, h, a, b, c, _constant(table, r + 5), w5)
        f, b = _step(c, d, e, f, g, h, a, b, _constant(table, r + 6), w6)
        e, a = _step(b, c, d, e, f, g, h, a, _constant(table, r + 7), w7)
        d, h = _step(a, b, c, d, e, f, g, h, _constant(table, r + 8), w8)
        c, g = _step(h, a, b, c, d, e, f, g, _constant(table, r + 9), w9)
        b, f = _step(g, h, a, b, c, d, e, f, _constant(table, r + 10), w10)
        a, e = _step(f, g, h, a, b, c, d, e, _constant(table, r + 11), w11)
        h, d = _step(e, f, g, h, a, b, c, d, _constant(table, r + 12), w12)
        g, c = _step(d, e, f, g, h, a, b, c, _constant(table, r + 13), w13)
        f, b = _step(c, d, e, f, g, h, a, b, _constant(table, r + 14), w14)
        e, a = _step(b, c, d, e, f, g, h, a, _constant(table, r + 15), w15)
        w0, w1 = _next(w0, w1, w9, w14), _next(w1, w2, w10, w15)
        w2, w3 = _next(w2, w3, w11, w0), _next(w3, w4, w12, w1)
        w4, w5 = _next(w4, w5, w13, w2), _next(w5, w6, w14, w3)
        w6, w7 = _next(w6, w7, w15, w4), _next(w7, w8, w0, w5)
        w8, w9 = _next(w8, w9, w1, w6), _next(w9, w10, w2, w7)
        w10, w11 = _next(w10, w11, w3, w8), _next(w11, w12, w4, w9)
        w12, w13 = _next(w12, w13, w5, w10), _next(w13, w14, w6, w11)
        w14, w15 = _next(w14, w15, w7, w12), _next(w15, w0, w8, w13)
    return h0 + a, h1 + b, h2 + c, h3 + d, h4 + e, h5 + f, h6 + g, h7 + h


@jit(do_not_specialize=["leaves"])
def _leaf_digests(words, out, table, leaves, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    await_inputs()
    leaf = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside, at = leaf < leaves, leaf * (BLOCKS * 16)
    zero = tl.zeros([LANES], tl.uint32)
    h0, h1, h2, h3 = zero + 0x6A09E667, zero + 0xBB67AE85, zero + 0x3C6EF372, zero + 0xA54FF53A
    h4, h5, h6, h7 = zero + 0x510E527F, zero + 0x9B05688C, zero + 0x1F83D9AB, zero + 0x5BE0CD19
    for block in range(BLOCKS + 1):
        padding = (zero + block // BLOCKS).to(tl.uint32)  # 1 behind the last block
        h0, h1, h2, h3, h4, h5, h6, h7 = _compressed(
            h0, h1, h2, h3, h4, h5, h6, h7, words, at + block * 16, inside & (block < BLOCKS), padding, table,
            BLOCKS * 512,
        )  # fmt: skip
    out += leaf * 8
    tl.store(out, _big_endian(h0).to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 1, _big_endian(h1).to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 2, _big_endian(h2).to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 3, _big_endian(h3).to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 4, _big_endian(h4).to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 5, _big_endian(h5).to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 6, _big_endian(h6).to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + 7, _big_endian(h7).to(tl.int32, bitcast=True), mask=inside)


def leaf_digests(vector: Tensor, size: int) -> Tensor:
    """The SHA-256 of every whole piece of ``size`` bytes of a contiguous vector, as bytes [pieces, 32]."""
    if not vector.is_contiguous() or size % BLOCK:
        what = f"strides {vector.stride()} and pieces of {size} bytes"
        raise ValueError(f"digests: got {what}, expected a contiguous vector and a multiple of {BLOCK}")
    leaves = vector.nbytes // size
    digests = torch.empty(leaves, DIGEST_WORDS, dtype=torch.int32, device=vector.device)
    if leaves:
        words = vector.reshape(-1).view(torch.uint8)[: leaves * size].view(torch.int32)
        grid, given = (triton.cdiv(leaves, LANES),), (words, digests, _table(vector.device), leaves)
        _leaf_digests[grid](*given, size // BLOCK, LANES, num_warps=LANES // 32)
    return digests.view(torch.uint8)


@cache
def _table(device: torch.device) -> Tensor:
    """The constants of the 64 steps: the first 32 bits behind the point of the cube roots of the first primes."""
    primes = [n for n in range(2, 312) if all(n % factor for factor in range(2, n))]
    roots = [_cube_root(prime << 96) % 2**32 for prime in primes]
    return torch.from_numpy(np.array(roots, np.uint32).view(np.int32)).to(device)


def _cube_root(n: int) -> int:
    low, high = 0, 1 << 40
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**3 <= n else (low, middle)
    return low
