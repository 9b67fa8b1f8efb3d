"""Small messages between the ranks, and waiting for each other.

Ranks that wait do not spin: they poll a non-blocking barrier with short sleeps, so that waiting takes no core
and Python signal handlers still run.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
from mpi4py import MPI

from ..support.errors import UserError
from .wait_limit import WaitLimit

T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound="Messages")


def waits(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorator of what waits for other ranks, which ``World.limit_waiting`` limits."""

    @wraps(method)
    def limited(self: S, *arguments: P.args, **options: P.kwargs) -> T:
        with self.wait_limit:
            return method(self, *arguments, **options)

    return cast("Callable[Concatenate[S, P], T]", limited)


class Messages:
    """What the ranks of a communicator say to each other; ``World`` makes the communicators."""

    comm: MPI.Intracomm
    node: MPI.Intracomm  # the ranks of this one's node
    rank: int
    size: int
    neighbours: list[int]  # the ranks of ``node``, as numbers of ``comm``

    def __init__(self) -> None:
        self.wait_limit = WaitLimit()
        self.seconds_waiting = 0.0
        self.bytes_moved = 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self.wait_for(self.comm.Ibarrier())

    @waits
    def wait_for(self, request: MPI.Request) -> None:
        """Poll a request until it is complete, without spinning."""
        start = time.perf_counter()
        while not request.Test():
            # A twentieth of the time waited so far: short waits end promptly, long ones cost nothing.
            time.sleep(min(max(2e-5, (time.perf_counter() - start) / 20), 1e-3))
        self.seconds_waiting += time.perf_counter() - start

    @waits
    def broadcast_json(self, message: dict[str, Any] | None = None) -> dict[str, Any]:
        """The root's small message, on every rank."""
        if self.size == 1:
            return message or {}
        self.barrier()
        text = np.frombuffer(json.dumps(message).encode(), np.uint8) if self.rank == 0 else None
        length = np.array(0 if text is None else len(text), np.int64)
        self.comm.Bcast(length)
        buffer = text.copy() if text is not None else np.empty(int(length), np.uint8)
        self.comm.Bcast(buffer)
        return cast("dict[str, Any]", json.loads(buffer.tobytes()))

    @waits
    def gather(self, row: Sequence[float]) -> np.ndarray:
        """Every rank's few numbers, [ranks, numbers], on the root (elsewhere: empty)."""
        mine = np.asarray(row, np.float64)
        if self.size == 1:
            return mine[None]
        table = np.empty((self.size if self.rank == 0 else 0, len(mine)), np.float64)
        self.barrier()
        self.comm.Gather(mine, table)
        return table

    @waits
    def reduce_sum(self, table: np.ndarray) -> np.ndarray:
        """The ranks' tables of the same shape, added up on the root (elsewhere: this rank's own)."""
        mine = np.ascontiguousarray(table, np.float64)
        if self.size == 1:
            return mine
        total = np.empty_like(mine) if self.rank == 0 else mine
        self.barrier()
        self.comm.Reduce(mine, total if self.rank == 0 else None, MPI.SUM)
        return total

    def allreduce_sum(self, table: np.ndarray) -> np.ndarray:
        """The ranks' small tables of the same shape, added up on every rank."""
        total = np.array(table, np.float64)
        if self.size > 1:
            self.barrier()
            self.comm.Allreduce(MPI.IN_PLACE, total)
        return total

    def allreduce_min(self, numbers: Sequence[int]) -> list[int]:
        """The least of all ranks' numbers, one by one, on every rank."""
        least = np.array(numbers, np.int64)
        if self.size > 1:
            self.barrier()
            self.comm.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
        return cast("list[int]", least.tolist())

    def allreduce_max(self, array: np.ndarray) -> None:
        """The largest values of all ranks in place, on every rank; counted as moved up and down."""
        if self.size > 1:
            self.barrier()
            self.comm.Allreduce(MPI.IN_PLACE, array, MPI.MAX)
            self.bytes_moved += 2 * (self.size - 1) * array.nbytes

    def allgather_json(self, item: Any) -> list[Any]:
        """Every rank's small item, on every rank."""
        text = json.dumps(item).encode()
        width = self.broadcast_json({"width": int(self.gather([len(text)]).max(initial=0))})["width"]
        table = self.gather([*text.ljust(width)]).astype("uint8")
        items: list[Any] = self.broadcast_json({"items": [json.loads(row.tobytes()) for row in table]})["items"]
        return items

    @waits
    def all_ranks(self, condition: bool) -> bool:
        """Whether the condition holds on every rank."""
        if self.size == 1:
            return condition
        flag = np.array(int(condition))
        self.barrier()
        self.comm.Allreduce(MPI.IN_PLACE, flag, MPI.MIN)
        return bool(flag)

    @waits
    def all_on_node(self, condition: bool) -> bool:
        """Whether the condition holds on every rank of this node."""
        flag = np.array(int(condition))
        self.node.Allreduce(MPI.IN_PLACE, flag, MPI.MIN)
        return bool(flag)

    def collectively(self, action: Callable[[], T]) -> T:
        """Do on every rank what may fail on some of them; then all raise, with the message of the first that failed."""
        result, message = None, ""
        try:
            result = action()
        except UserError as error:
            message = str(error) or "failed"
            if 0 not in self.neighbours:  # what is wrong there may be right where the user looks
                message += f" (rank {self.rank} on {platform.node()})"
        message = self._first_message(message)
        if message:
            raise UserError(message)
        return cast(T, result)

    def on_root(self, action: Callable[[], T]) -> T | None:
        """Do something on the root alone; all ranks wait for it, and raise if it fails."""
        return self.collectively(action if self.rank == 0 else lambda: None)

    @waits
    def _first_message(self, message: str) -> str:
        """The first rank's text that is not empty, on every rank."""
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
