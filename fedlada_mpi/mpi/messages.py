"""Collectives for small messages: settings, orders, numbers, errors. Vectors move by a ``Transport``.

A collective of all ranks starts with a barrier in which they do not spin: they test a non-blocking barrier and sleep in
between, so that a rank that waits leaves its core to others and Python's signal handlers run.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
from mpi4py import MPI

from ..support.errors import PublicError, UserError
from .wait_limit import WaitLimit

LOOK = 1.0  # seconds between looks at what may keep the others

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="Messages")


def waits(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator of a method that waits for other ranks; ``World.limit_waiting`` sets for how long it may."""

    @wraps(method)
    def limited(self: S, *arguments: P.args, **options: P.kwargs) -> T:
        with self.wait_limit:
            return method(self, *arguments, **options)

    return cast("Callable[Concatenate[S, P], T]", limited)


class Messages:
    """The collectives of ``World``: every rank must call the same ones, in the same order."""

    comm: MPI.Intracomm
    node: MPI.Intracomm  # the ranks on this rank's node
    rank: int
    size: int
    neighbours: list[int]  # the ranks of ``node``, by their numbers in ``comm``

    def __init__(self) -> None:
        self.wait_limit = WaitLimit()
        self.seconds_waiting = 0.0  # in barriers
        self.bytes_moved = 0  # between ranks
        self.conceal: Callable[[str], str] | None = None  # what others get to see of an error on this rank
        self.heard = hashlib.sha256()  # of all that the root has told, the same on all ranks that were told the same

    def forget(self) -> None:
        """Begin with ``heard`` anew: what ranks were told before a loss may differ."""
        self.heard = hashlib.sha256()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self.wait_for(self.comm.Ibarrier())

    @waits
    def wait_for(self, request: MPI.Request) -> None:
        """Test a request until it is complete, and sleep in between."""
        start, looks = time.perf_counter(), 0
        while not request.Test():
            waited = time.perf_counter() - start
            if waited > (looks + 1) * LOOK:
                looks += 1
                self.still_waiting()
            # For a twentieth of the time waited so far: short waits end promptly, long ones take no core.
            time.sleep(min(max(2e-5, waited / 20), 1e-3))
        self.seconds_waiting += time.perf_counter() - start

    def still_waiting(self) -> None:
        """Called every ``LOOK`` seconds while this rank waits for others."""

    @waits
    def broadcast_json(self, message: dict[str, Any] | None = None) -> dict[str, Any]:
        """The root's message, on every rank; what the others pass is ignored."""
        if self.size == 1:  # a copy, as ranks get it: whoever changes it does not change the root's
            return cast("dict[str, Any]", json.loads(json.dumps(message or {})))
        self.barrier()
        text = np.frombuffer(json.dumps(message).encode(), np.uint8) if self.rank == 0 else None
        length = np.array(0 if text is None else len(text), np.int64)
        self.comm.Bcast(length)
        buffer = text.copy() if text is not None else np.empty(int(length), np.uint8)
        self.comm.Bcast(buffer)
        self.heard.update(np.array(len(buffer), "<i8").tobytes() + buffer.tobytes())
        return cast("dict[str, Any]", json.loads(buffer.tobytes()))

    @waits
    def gather(self, row: Sequence[float]) -> np.ndarray:
        """Every rank's numbers as rows [size, numbers] on the root; [0, numbers] on the others."""
        mine = np.asarray(row, np.float64)
        if self.size == 1:
            return mine[None]
        table = np.empty((self.size if self.rank == 0 else 0, len(mine)), np.float64)
        self.barrier()
        self.comm.Gather(mine, table)
        return table

    @waits
    def reduce_sum(self, table: np.ndarray) -> np.ndarray:
        """The sum of the ranks' tables, which have one shape, on the root; the others get their own back."""
        mine = np.ascontiguousarray(table, np.float64)
        if self.size == 1:
            return mine
        total = np.empty_like(mine) if self.rank == 0 else mine
        self.barrier()
        self.comm.Reduce(mine, total if self.rank == 0 else None, MPI.SUM)
        return total

    @waits
    def reduce_words(self, words: np.ndarray) -> np.ndarray:
        """The sum of the ranks' int64 words modulo 2^64, on the root; the others get their own back."""
        if self.size == 1:
            return words
        total = np.empty_like(words)
        self.barrier()
        # Unsigned, whose sums wrap around by definition.
        self.comm.Reduce(words.view(np.uint64), total.view(np.uint64) if self.rank == 0 else None, MPI.SUM)
        return total if self.rank == 0 else words

    def allreduce_sum(self, table: np.ndarray) -> np.ndarray:
        """The sum of the ranks' tables, which have one shape, on every rank."""
        return self._allreduce(np.array(table, np.float64), MPI.SUM)

    def sum_integers(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' int64 arrays, which have one shape, on every rank; it wraps around."""
        return self._allreduce(np.array(array, np.int64).view(np.uint64), MPI.SUM).view(np.int64)

    def allreduce_min(self, numbers: Sequence[int]) -> list[int]:
        """The element-wise minimum of the ranks' lists, which have one length, on every rank."""
        return cast("list[int]", self._allreduce(np.array(numbers, np.int64), MPI.MIN).tolist())

    def allreduce_max(self, array: np.ndarray) -> None:
        """The element-wise maximum, in place, on every rank; counts as moved to the root and back."""
        self._allreduce(array, MPI.MAX)
        self.bytes_moved += 2 * (self.size - 1) * array.nbytes

    def all_ranks(self, condition: bool) -> bool:
        """Whether the condition holds on every rank."""
        return bool(self._allreduce(np.array(int(condition)), MPI.MIN))

    @waits
    def all_on_node(self, condition: bool) -> bool:
        """Whether the condition holds on every rank of this node."""
        flag = np.array(int(condition))
        self.node.Allreduce(MPI.IN_PLACE, flag, MPI.MIN)
        return bool(flag)

    @waits
    def _allreduce(self, array: np.ndarray, operation: MPI.Op) -> np.ndarray:
        """Reduce the ranks' arrays, in place on every rank."""
        if self.size > 1:
            self.barrier()
            self.comm.Allreduce(MPI.IN_PLACE, array, operation)
        return array

    def allgather_json(self, item: Any) -> list[Any]:
        """Every rank's item, in the order of the ranks, on every rank."""
        text = json.dumps(item).encode()
        width = self.broadcast_json({"width": int(self.gather([len(text)]).max(initial=0))})["width"]
        table = self.gather([*text.ljust(width)]).astype("uint8")
        items: list[Any] = self.broadcast_json({"items": [json.loads(row.tobytes()) for row in table]})["items"]
        return items

    def collectively(self, action: Callable[[], T]) -> T:
        """Call ``action`` on every rank. If it raises UserError on some, all raise, with the message of the first.

        Without this, the ranks on which nothing failed would wait for the others in the next collective.

        >>> from fedlada_mpi.mpi import World
        >>> from fedlada_mpi.support.errors import UserError
        >>> def read_shard():
        ...     if world.rank == world.size - 1:
        ...         raise UserError("shard_3.h5 is damaged")
        >>> with World() as world:
        ...     world.collectively(read_shard)  # raises on every rank
        Traceback (most recent call last):
        fedlada_mpi.support.errors.UserError: shard_3.h5 is damaged
        """
        result, message = None, ""
        try:
            result = action()
        except UserError as error:
            message = str(error) or "failed"
            if self.conceal is not None and not isinstance(error, PublicError):
                message = self.conceal(message)
            elif 0 not in self.neighbours:  # the file or device in question may be fine on the root's node
                message += f" (rank {self.rank} on {platform.node()})"
        message = self._first_message(message)
        if message:
            raise UserError(message)
        return cast(T, result)

    def on_root(self, action: Callable[[], T]) -> T | None:
        """Call ``action`` on the root only; the others get None. If it raises UserError, all ranks raise."""
        return self.collectively(action if self.rank == 0 else lambda: None)

    @waits
    def _first_message(self, message: str) -> str:
        """On every rank, the message of the lowest rank that has one."""
        if self.size == 1:
            return message
        self.barrier()
        lengths = np.empty(self.size, np.int64)
        text = message.encode()
        self.comm.Allgather(np.array(len(text), np.int64), lengths)
        failed = np.flatnonzero(lengths)
        if not len(failed):
            return ""
        first = int(failed[0])
        buffer = np.empty(int(lengths[first]), np.uint8)
        if self.rank == first:
            buffer[:] = np.frombuffer(text, np.uint8)
        self.comm.Bcast(buffer, root=first)
        return buffer.tobytes().decode()
