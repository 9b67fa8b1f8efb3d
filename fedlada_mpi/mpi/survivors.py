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
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NoReturn, cast

import numpy as np
from mpi4py import MPI

from ..support import signals
from ..support.errors import NO_ANSWER, OtherRankError, PublicError, UserError
from ..support.processes import ProcessId, this_process
from .messages import Messages, waits
from .watchdog import Watchdog

SETTLE = 0.5  # seconds in which MPI learns of all ranks that die at once, as those of a node do
MEMBER = 600  # bytes of a ``ProcessId`` as JSON
UNNOTICED = 10  # looks at a neighbour that has ended, in which MPI should have noticed
GRACE = 2.0  # seconds for the first rank of a node to say why it gives up, and to release what it holds

# What a call raises where another rank has died. Its error class seldom says so.
RankLost = MPI.Exception

_remaining: MPI.Intracomm = MPI.COMM_WORLD  # without the ranks that are lost


class Survivors(Messages):
    """The ranks that are left, numbered 0 to ``size - 1``; ``shrink`` numbers them anew.

    ``original_ranks`` has their numbers in the world as it began, ``members`` the processes of all ``original_size``
    ranks of that world. If ranks 1 and 2 of 4 are lost, ``size`` is 2 and ``original_ranks`` is [0, 3].
    """

    hint = "run it again, with --resume to go on from a checkpoint"  # where this rank gives up
    release: Callable[[], object] = staticmethod(lambda: None)  # gives back what this process holds

    def __init__(self) -> None:
        super().__init__()
        self.fails_together = False  # whether all ranks raise, as they have agreed, what this one raises
        self._unnoticed = 0
        self.tolerant = tolerant()
        self.communicators: list[MPI.Comm] = []  # in which this rank may be waiting
        self.members: list[ProcessId] = []  # by original rank; empty unless ``tolerant``
        self._join_remaining()
        self.original_size = self.size
        self.original_ranks = list(range(self.size))
        self._abandoned: list[ExitStack] = []
        self.watchdog = Watchdog(self._next_on_node()) if self.tolerant else None

    @waits
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

    def _all_members(self) -> list[ProcessId]:
        mine = json.dumps(this_process()).encode().ljust(MEMBER)
        table = np.empty((self.size, MEMBER), np.uint8)
        self.comm.Allgather(np.frombuffer(mine, np.uint8), table)
        return [ProcessId(*json.loads(row.tobytes())) for row in table]

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
            self.members[original].kill()
        # What was shared with lost ranks is never freed: that takes all of them, and MPI may still write to it.
        self._abandoned.append(self.at_close)
        self._join(comm)
        if self.watchdog:
            self.watchdog.processes = self._next_on_node()

    def still_waiting(self) -> None:
        """End the run where a neighbour has exited: MPI tells of processes that were killed, not of such ones."""
        gone = self.watchdog.gone if self.watchdog else []
        known = self.comm.Get_failed() if gone else None
        unknown = [process for process in gone if not self._is_among(process, known)]
        self._unnoticed = self._unnoticed + 1 if unknown else 0
        if self._unnoticed < UNNOTICED:
            return
        me = this_process()
        for member in self.members:
            if member != me:
                member.kill()
        rank = self.members.index(unknown[0])
        self.leave(f"waits for rank {rank}, whose process {unknown[0].pid} has exited")

    def _is_among(self, process: ProcessId, failed: MPI.Group | None) -> bool:
        rank = self.original_ranks.index(self.members.index(process))
        (place,) = MPI.Group.Translate_ranks(self.comm.Get_group(), [rank], failed) if failed else [MPI.UNDEFINED]
        return place != MPI.UNDEFINED

    def leave(self, why: str) -> NoReturn:
        """Give up: end this process with one line, and without MPI, which may be waiting for what is lost."""
        # One message is enough: when the first rank of a node gives up, the launcher ends the others meanwhile.
        time.sleep(GRACE if self.node.rank else 0)
        sys.stdout.flush()
        sys.stderr.write(f"error: rank {self.rank} of {self.size} on {platform.node()} {why}: {self.hint}\n")
        sys.stderr.flush()
        # In a thread, because the disk may hang, too.
        releasing = threading.Thread(target=self.release, daemon=True)
        releasing.start()
        releasing.join(GRACE)
        os._exit(NO_ANSWER)

    def die(self, error: BaseException) -> NoReturn:
        """Print the error and end this process as if it had been killed: the others go on without it."""
        self.print_failure(error)
        os.kill(os.getpid(), signal.SIGKILL if self.size > 1 else signal.SIGABRT)
        raise AssertionError

    def print_failure(self, error: BaseException) -> None:
        """What this rank has to say of its error: a message, a traceback, or nothing if another rank failed."""
        sys.stdout.flush()
        if isinstance(error, UserError):
            shown = str(error) if self.conceal is None or isinstance(error, PublicError) else self.conceal(str(error))
            sys.stderr.write(f"error: {shown}\n")
        elif not isinstance(error, OtherRankError):
            text = "".join(traceback.format_exception(error))
            if self.conceal is not None:
                text = f"{self.conceal(text)}\n"
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

    def _next_on_node(self) -> list[ProcessId]:
        """The process that this rank watches: that of the next rank of its node, if there is another in sight."""
        after = self.neighbours[(self.neighbours.index(self.rank) + 1) % len(self.neighbours)]
        process = self.members[self.original_ranks[after]]
        return [process] if after != self.rank and process.is_visible else []


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
