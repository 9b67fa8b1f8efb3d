"""Masks: streams of random words that two silos both know, and that one of them adds and the other subtracts.

They do not depend on the data: a thread makes them while clients train, or a GPU on its side stream. The integers that
a silo adds its clients' values to begin as its masks: what it will send is never in memory without them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..gpu.side_stream import SideStream
from .agreement import AES, Epoch

BLOCK = 1 << 17  # words at a time, which stay in the cache
MORE = 16  # bytes that a cipher asks for in addition
LEAF = 2048  # bytes of a vector that are hashed at once; of fewer, hashlib would keep other threads waiting

Streams = list[tuple[bytes, int]]


class Masks:
    """The masks of one silo in an epoch; the server has none.

    >>> masks.start("round", 3, rows, received=[s.x])   # as soon as the order is there
    >>> masks.ready()                                   # before the first client's values are added to the rows
    """

    def __init__(self, epoch: Epoch, heard: Callable[[], str] = str):
        """``heard``: a digest of what the server has told this silo in the epoch so far."""
        self.epoch, self.heard = epoch, heard
        self._received = b""  # a digest of the vectors of all messages so far
        self._used: set[tuple[str, int]] = set()
        self._numbers = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._from_host: tuple[Tensor, Tensor] | None = None  # rows on a GPU, and their masks on the host
        self._side: SideStream | None = None

    def start(self, what: str, number: int, rows: Tensor, received: Sequence[Tensor]) -> None:
        """Begin to overwrite the integer ``rows`` with the masks of a message, a stream for each row.

        ``received``: the vectors that the server has sent for it. Neither they nor the rows change before ``ready``.
        Masks depend on these, on those of all messages before, and on all that the server has told.
        """
        self._claim(what, number)
        rows.zero_()
        if not self.epoch.keys:
            return
        if _has_kernels(rows):
            self._start_on_device(what, number, rows, self._digest(received, self.heard()))
        else:
            self._start_thread(what, number, rows, received, self.heard())

    def _digest(self, received: Iterable[Tensor | bytes], heard: str) -> bytes:
        self._received = received_digest([self._received, *received])
        return received_digest([self._received], heard)

    def _start_on_device(self, what: str, number: int, rows: Tensor, digest: bytes) -> None:
        """Behind what the current stream has been given so far, and beside all that follows.

        The rows are held by the caller; keys are memory of the side stream, which alone may get it again.
        """
        self._side = self._side or SideStream(rows.device)
        streams = [self.epoch.streams(f"{what} {i}", number, digest) for i in range(len(rows))]
        self._side.submit(partial(_add_on_device, rows, streams), rows)

    def _start_thread(self, what: str, number: int, rows: Tensor, received: Sequence[Tensor], heard: str) -> None:
        # By the main thread where it is on a GPU: another must not call CUDA while a graph is captured.
        given = [leaves(vector) if vector.is_cuda else vector for vector in received]
        host = torch.zeros(rows.shape, dtype=rows.dtype) if rows.is_cuda else rows
        self._from_host = (rows, host) if rows.is_cuda else None

        def make() -> None:
            try:
                digest = self._digest(given, heard)
                for i, row in enumerate(host):
                    add_streams(row.numpy(), self.epoch.streams(f"{what} {i}", number, digest), self.epoch.cipher)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=make, name="masks", daemon=True)
        self._thread.start()

    def ready(self) -> None:
        """Wait until the rows that were given to ``start`` are masks; a GPU's current stream waits in its order."""
        if self._side is not None:
            self._side.join()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure
        if self._from_host is not None:
            rows, host = self._from_host
            rows.copy_(host)
            self._from_host = None

    def words(self, words: np.ndarray, received: Sequence[Tensor] = ()) -> None:
        """Mask a short message, in place."""
        self._numbers += 1
        self._claim("numbers", self._numbers)
        if self.epoch.keys:
            self.ready()
            digest = self._digest(received, self.heard())
            add_streams(words, self.epoch.streams("numbers", self._numbers, digest), self.epoch.cipher)

    def _claim(self, what: str, number: int) -> None:
        """A stream that is used twice would show the difference of what it has masked."""
        if (what, number) in self._used:
            raise RuntimeError(f"the masks of {what} {number} have been used")
        self._used.add((what, number))


def received_digest(received: Iterable[Tensor | bytes], about: Any = None) -> bytes:
    """SHA-256 of what a silo has received, vectors or their ``leaves``: the same on all that have received the same."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for each in received:
        digest.update(each if isinstance(each, bytes) else leaves(each))
    return digest.digest()


def leaves(vector: Tensor) -> bytes:
    """SHA-256 of every piece of a vector, one behind the other: a GPU computes them at once."""
    content, on_device = vector.contiguous().view(torch.uint8), b""
    if vector.is_cuda:
        from ..gpu import digest_kernels, triton_support

        if triton_support.available():
            on_device = digest_kernels.leaf_digests(vector.contiguous(), LEAF).cpu().numpy().tobytes()
            content = content[len(content) // LEAF * LEAF :]
    data = content.cpu().numpy().data
    parts = (data[first : first + LEAF] for first in range(0, len(data), LEAF))
    return on_device + b"".join(hashlib.sha256(part).digest() for part in parts)


def add_streams(words: np.ndarray, streams: Streams, cipher: str) -> None:
    """Add to int64 words, modulo 2^64, every stream with its sign; a stream is little-endian on any machine."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    zeros, drawn = memoryview(bytes(8 * BLOCK)), bytearray(8 * BLOCK + MORE)
    values = np.frombuffer(drawn, "<i8")
    for key, sign in streams:
        # A key is used once, so that nonce and counter may start at zero.
        if cipher == AES:
            stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        else:
            stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
        add = np.add if sign > 0 else np.subtract
        for first in range(0, len(words), BLOCK):
            part = words[first : first + BLOCK]
            stream.update_into(zeros[: 8 * len(part)], drawn)
            add(part, values[: len(part)], out=part)


def _has_kernels(rows: Tensor) -> bool:
    """Whether streams are made where the rows are."""
    from ..gpu import triton_support

    return rows.is_cuda and triton_support.available()


def _add_on_device(rows: Tensor, streams: Sequence[Streams]) -> None:
    from ..gpu import chacha_kernels

    for row, several in zip(rows, streams, strict=True):
        chacha_kernels.add_streams(row, [key for key, _ in several], [sign for _, sign in several])
