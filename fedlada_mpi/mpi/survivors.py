"""Ranks that are lost: how the others learn of it, agree on it and go on without them.

This takes an MPI whose ranks survive the death of another (ULFM: ``mpirun --with-ft ulfm``). A call that needs a dead
rank then raises ``RankLost`` on some of the others. They revoke their communicators, so that nobody goes on waiting in
them (``Survivors.agree``), and shrink to a communicator of those that are left (``Survivors.shrink``). Without ULFM,
the launcher ends all ranks when one dies, and nothing here happens.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from typing import NamedTuple, NoReturn, cast

import numpy as np
from mpi4py import MPI

from ..support import signals
from ..support.errors import OtherRankError, UserError
from .messages import Messages, waits
from .watchdog import Watchdog

SETTLE = 0.5  # seconds in which MPI learns of all ranks that die at once, as those of a node do
MEMBER = 400  # bytes of a ``Member`` as JSON

# What a call raises where another rank has died. Its error class seldom says so.
RankLost = MPI.Exception

_remaining: MPI.Intracomm = MPI.COMM_WORLD  # without the ranks that are lost


class Member(NamedTuple):
    """The process of a rank."""

    host: str
    pid: int


class Survivors(Messages):
    """The ranks that are left, numbered 0 to ``size - 1``; ``shrink`` numbers them anew.

    ``original_ranks`` has their numbers in the world as it began, ``members`` the processes of all ``original_size``
    ranks of that world. If ranks 1 and 2 of 4 are lost, ``size`` is 2 and ``original_ranks`` is [0, 3].
    """

    def __init__(self) -> None:
        super().__init__()
        self.tolerant = tolerant()
        self.communicators: list[MPI.Comm] = []  # in which this rank may be waiting
        self.members: list[Member] = []  # by original rank; empty unless ``tolerant``
        self._join_remaining()
        self.original_size = self.size
        self.original_ranks = list(range(self.size))
        self._abandoned: list[ExitStack] = []
        self.watchdog = Watchdog(self._next_on_node()) if self.tolerant else None

    def _join_remaining(self) -> None:
        """Join all ranks there are. If one is lost meanwhile, the others agree on that and start over."""
        global _remaining
        while True:
            joined = 1
            try:
                self._join(_remaining.Dup())
                self.members = self._all_members() if self.tolerant else []
            except RankLost:
                if not self.tolerant:
                    raise
                joined = 0
                self._revoke()
            if not self.tolerant or _agreed(_remaining, joined):
                return
            _remaining.Revoke()
            time.sleep(SETTLE)
            _remaining = _shrunk(_remaining)

    def _join(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.communicators = [comm]
        self.at_close = ExitStack()  # frees what else the ranks share
        self.node = cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))
        self.communicators.append(self.node)
        ranks = np.empty(self.node.size, np.int64)
        self.node.Allgather(np.array(self.rank, np.int64), ranks)
        self.neighbours = sorted(ranks.tolist())

    def _all_members(self) -> list[Member]:
        mine = json.dumps([platform.node(), os.getpid()]).encode().ljust(MEMBER)
        table = np.empty((self.size, MEMBER), np.uint8)
        self.comm.Allgather(np.frombuffer(mine, np.uint8), table)
        return [Member(*json.loads(row.tobytes())) for row in table]

    @waits
    def agree(self, flags: int, good: int) -> int:
        """The bits that are set in the flags of every rank that is left, the same on each of them.

        A rank whose flags are not ``good`` revokes the communicators, so that no other waits for it in one of them.
        """
        if not self.tolerant:
            return flags
        if flags != good:
            self._revoke()
        return _agreed(self.comm, flags)

    @waits
    def shrink(self) -> None:
        """Go on with the ranks that are left."""
        global _remaining
        self._revoke()
        time.sleep(SETTLE)
        before, comm = self.comm, _shrunk(self.comm)
        kept = MPI.Group.Translate_ranks(comm.Get_group(), list(range(comm.size)), before.Get_group())
        lost = [original for rank, original in enumerate(self.original_ranks) if rank not in kept]
        self.original_ranks = [self.original_ranks[rank] for rank in kept]
        _remaining = comm
        for original in lost:  # its process may only have been stopped, and would go on writing when it wakes up
            member = self.members[original]
            if member.host == platform.node():
                with suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)
        # What was shared with lost ranks is never freed: that takes all of them, and MPI may still write to it.
        self._abandoned.append(self.at_close)
        self._join(comm)
        if self.watchdog:
            self.watchdog.pids = self._next_on_node()

    def die(self, error: BaseException) -> NoReturn:
        """Print the error and end this process as if it had been killed: the others go on without it."""
        self.print_failure(error)
        os.kill(os.getpid(), signal.SIGKILL if self.size > 1 else signal.SIGABRT)
        raise AssertionError

    def print_failure(self, error: BaseException) -> None:
        """What this rank has to say of its error: a message, a traceback, or nothing if another rank failed."""
        sys.stdout.flush()
        if isinstance(error, UserError):
            sys.stderr.write(f"error: {error}\n")
        elif not isinstance(error, OtherRankError):
            text = "".join(traceback.format_exception(error))
            sys.stderr.write(f"rank {self.rank} of {self.size} failed:\n{text}")
        sys.stderr.flush()

    def _revoke(self) -> None:
        """End all waiting in the communicators, on every rank, with ``RankLost``."""
        for comm in self.communicators:
            with suppress(RankLost):
                comm.Revoke()

    def _free(self) -> None:
        """Free the communicators; collective."""
        self.node.Free()
        if self.comm is not _remaining:
            self.comm.Free()

    def _next_on_node(self) -> list[int]:
        """The process that this rank watches: that of the next rank of its node, if there is another."""
        after = self.neighbours[(self.neighbours.index(self.rank) + 1) % len(self.neighbours)]
        return [self.members[self.original_ranks[after]].pid] if after != self.rank else []


def tolerant() -> bool:
    """Whether MPI lets the other ranks go on where one dies."""
    return signals.tolerant() and MPI.COMM_WORLD.size > 1


def is_root() -> bool:
    """Whether this process prints for all ranks: it is rank 0 of those that MPI started together and that are left."""
    return _remaining.rank == 0


def several_ranks() -> bool:
    """Whether this process is one of several that MPI has started together."""
    return _remaining.size > 1


def _agreed(comm: MPI.Intracomm, flags: int) -> int:
    while True:
        try:
            return comm.Agree(flags)
        except RankLost:  # raised on all ranks alike, if one of them did not know of a loss yet
            comm.Ack_failed()


def _shrunk(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator of those of its ranks that are left."""
    return cast(MPI.Intracomm, comm.Shrink())
