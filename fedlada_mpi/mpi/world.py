"""The ranks of a run: start-up and launcher checks, failures, and ranks that are lost.

Where MPI tolerates it (``mpirun --with-ft ulfm``), the ranks that are left when others die agree, shrink and go on:
``World.agree`` and ``World.shrink``, which ``launch.py`` calls. What MPI raises then is ``RankLost``.
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
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, cast

# Open MPI's UCX window component complains on every machine without UCX; shared windows do not use it.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
from ..support import signals

if signals.tolerant():
    # Its collectives over several nodes have communicators of their own, in which ranks wait for the dead.
    os.environ.setdefault("OMPI_MCA_coll", "^han")

import numpy as np
from mpi4py import MPI

from ..support.errors import NO_ANSWER, DivergedError, OtherRankError, UserError
from ..support.launcher import launched_processes
from .heartbeat import Heartbeat, Peer
from .messages import Messages, waits
from .wait_limit import WaitLimit
from .watchdog import Watchdog

_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")

GRACE = 2.0  # seconds for the first rank of a node to say why it gives up, and to release what it holds

TOGETHER = 0.5  # seconds in which MPI learns of all ranks that die at once, as with their node

# What a call raises where another rank has died; seldom with an error class that says so.
RankLost = MPI.Exception

_opening = threading.Lock()  # MPI does not take two collectives on one communicator at once
_open: list[World] = []
_left: MPI.Intracomm = MPI.COMM_WORLD  # of MPI's own world, those ranks that are not lost


def tolerant() -> bool:
    """Whether MPI lets the other ranks go on where one dies."""
    return signals.tolerant() and MPI.COMM_WORLD.size > 1


def _end_all_ranks(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An uncaught exception prints this rank's traceback and ends every rank."""
    world = _open[-1]
    _print_failure(world, kind, error, trace)
    code = 2 if isinstance(error, UserError) else 1
    if tolerant():  # where an abort does not end the others, which have agreed on the end
        os._exit(code)
    if world.size > 1:
        world.comm.Abort(code)


def _print_failure(
    world: World, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:  # fmt: skip
    sys.stdout.flush()
    if isinstance(error, UserError):
        sys.stderr.write(f"error: {error}\n")
    elif not isinstance(error, OtherRankError):
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(f"rank {world.rank} of {world.size} failed:\n{text}")
    sys.stderr.flush()


def _agreed(comm: MPI.Intracomm, flags: int) -> int:
    while True:
        try:
            return comm.Agree(flags)
        except RankLost:  # on all ranks alike, where not all knew of a loss
            comm.Ack_failed()


def _shrunk(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Of its ranks, those that are left."""
    return cast(MPI.Intracomm, comm.Shrink())


class Member(NamedTuple):
    """The process of a rank."""

    host: str
    pid: int


MEMBER = 400  # bytes, as text


class World(Messages):
    """The ranks of this run."""

    _excepthook_before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]

    def __init__(self) -> None:
        super().__init__()
        self.tolerant = tolerant()
        launched = launched_processes()
        if MPI.COMM_WORLD.size == 1 and launched > 1:
            kinds = "srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)"
            hint = kinds if "SLURM_STEP_NUM_TASKS" in os.environ else "the mpirun of the same MPI library"
            raise UserError(
                f"the launcher started {launched} processes, but MPI ({implementation()}) sees a world of 1: "
                f"start them with {hint}"
            )
        with _opening:
            self._begin()
            self._excepthook_before = _open[0]._excepthook_before if _open else sys.excepthook
            _open.append(self)
            sys.excepthook = _end_all_ranks
        self.original_ranks = list(range(self.size))  # as they were numbered at the beginning
        self._abandoned: list[ExitStack] = []
        self.heartbeat: Heartbeat | None = None
        self.watchdog = Watchdog(self._next_on_node()) if self.tolerant else None

    def _begin(self) -> None:
        """With the ranks that there are; where one is lost meanwhile, all agree on that and begin again."""
        global _left
        while True:
            good = 1
            try:
                self._join(_left.Dup())
                self.members = self._members()
            except RankLost:
                if not self.tolerant:
                    raise
                good = 0
                self._revoke()
            if not self.tolerant or _agreed(_left, good):
                return
            _left.Revoke()
            time.sleep(TOGETHER)
            _left = _shrunk(_left)

    def _members(self) -> list[Member]:
        """Every rank's process, by place; empty where nobody would ask."""
        if not self.tolerant:
            return []
        mine = json.dumps([platform.node(), os.getpid()]).encode().ljust(MEMBER)
        table = np.empty((self.size, MEMBER), np.uint8)
        self.comm.Allgather(np.frombuffer(mine, np.uint8), table)
        return [Member(*json.loads(row.tobytes())) for row in table]

    def _join(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.communicators: list[MPI.Comm] = [comm]  # that this rank may be waiting in
        self.at_close = ExitStack()  # for what else the ranks share
        self.node = cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))
        self.communicators.append(self.node)
        self.neighbours: list[int] = self._ranks_of_node()

    @waits
    def agree(self, flags: int, good: int) -> int:
        """The flags that all ranks have which are left, the same on each of them.

        A rank whose flags are not ``good`` ends what others may be waiting in.
        """
        if not self.tolerant:
            return flags
        if flags != good:
            self._revoke()
        return _agreed(self.comm, flags)

    def die(self, error: BaseException) -> NoReturn:
        """End this process with what it says of the error, as if it had been killed: the others go on."""
        _print_failure(self, type(error), error, error.__traceback__)
        os.kill(os.getpid(), signal.SIGKILL if self.size > 1 else signal.SIGABRT)
        raise AssertionError

    def _revoke(self) -> None:
        for comm in self.communicators:
            with suppress(RankLost):
                comm.Revoke()

    @waits
    def shrink(self) -> None:
        """Go on with the ranks that are left."""
        global _left
        self._revoke()
        if self.heartbeat:  # it would miss the nodes of lost ranks; ``limit_waiting`` begins another
            self.heartbeat.close()
            self.heartbeat = None
        time.sleep(TOGETHER)
        before, comm = self.comm, _shrunk(self.comm)
        new, old = comm.Get_group(), before.Get_group()
        kept = MPI.Group.Translate_ranks(new, list(range(comm.size)), old)
        lost = [place for rank, place in enumerate(self.original_ranks) if rank not in kept]
        self.original_ranks = [self.original_ranks[rank] for rank in kept]
        _left = comm
        for place in lost:  # it may be there still, and would go on writing when it wakes up
            member = self.members[place]
            if member.host == platform.node():
                with suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)
        # What the ranks shared before is not freed: that takes all of them, and MPI may still write to it.
        self._abandoned.append(self.at_close)
        self._join(comm)
        if self.watchdog:
            self.watchdog.pids = self._next_on_node()

    def _next_on_node(self) -> list[int]:
        """The process that this rank looks after: that of the next rank of its node, if there is another."""
        after = self.neighbours[(self.neighbours.index(self.rank) + 1) % len(self.neighbours)]
        return [self.members[self.original_ranks[after]].pid] if after != self.rank else []

    def limit_waiting(self, seconds: int, hint: str, release: Callable[[], object]) -> None:
        """From now on, end this process where it waits for other ranks for longer than ``seconds`` (0: never), or while
        another node gives no sign of life; collective.

        Before that, ``release`` gives back what the process holds.
        """

        def give_up() -> bool:
            ended = self.watchdog is not None and self.watchdog.end_stuck()
            if not ended:
                leave(f"has waited {seconds} s for other ranks: one of them hangs, or its node cannot be reached")
            return ended

        def missed(host: str, silent: float) -> None:
            if self.wait_limit.waiting:
                leave(f"waits for other ranks, and {host} has given no sign of life for {silent:.0f} s")

        def leave(why: str) -> NoReturn:
            # One message is enough: where the first rank of a node gives up, the launcher ends the others meanwhile.
            time.sleep(GRACE if self.node.rank else 0)
            sys.stdout.flush()
            sys.stderr.write(f"error: rank {self.rank} of {self.size} on {platform.node()} {why}: {hint}\n")
            sys.stderr.flush()
            # In a thread: the disk may hang, too.
            releasing = threading.Thread(target=release, daemon=True)
            releasing.start()
            releasing.join(GRACE)
            # Not by MPI, which may be waiting for the same node.
            os._exit(NO_ANSWER)

        self.wait_limit.close()
        self.wait_limit = WaitLimit(seconds if self.size > 1 else 0, give_up)
        self.heartbeat = self._heartbeat(missed) if seconds and self.size > 1 else None

    def _heartbeat(self, missed: Callable[[str, float], object]) -> Heartbeat | None:
        """Signs of life between the nodes, if there are several."""
        if len(self.neighbours) == self.size:
            return None
        with ExitStack() as failed:
            heartbeat = Heartbeat(self.neighbours[0])
            failed.callback(heartbeat.close)
            peers = self.allgather_json([*heartbeat.own, os.urandom(8).hex()])
            heartbeat.start([Peer(*peer) for *peer, _ in peers], peers[0][-1], missed)
            failed.pop_all()
        return heartbeat

    def close(self) -> None:
        """Free what the ranks share; collective."""
        self._free()
        self.wait_limit.close()
        for other in (self.heartbeat, self.watchdog):
            if other:
                other.close()

    @waits
    def _free(self) -> None:
        # A rank that has left already counts as lost.
        with suppress(*((RankLost,) if self.tolerant else ())):
            self.barrier()
            self.at_close.close()
            with _opening:
                self.node.Free()
                if self.comm is not _left:
                    self.comm.Free()
        with _opening:
            _open.remove(self)
            if not _open:
                sys.excepthook = self._excepthook_before

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close, unless this rank alone has failed: the others could not follow, and ``sys.excepthook`` ends them."""
        if self.size == 1 or kind is None or issubclass(kind, (UserError, DivergedError)):
            self.close()

    @property
    def original_size(self) -> int:
        """The number of ranks that there were before any was lost."""
        return len(self.members) or self.size

    def _ranks_of_node(self) -> list[int]:
        """The ranks on this node, this one included."""
        ranks = np.empty(self.node.size, np.int64)
        self.node.Allgather(np.array(self.rank, np.int64), ranks)
        return sorted(ranks.tolist())

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, from the launcher where it sets one."""
        for name in _LOCAL_RANKS:
            if os.environ.get(name, "").isdigit():
                return int(os.environ[name])
        return self.node.rank


def is_root() -> bool:
    """Whether this process prints for all ranks: rank 0 of MPI's own world, so each process where all are apart."""
    return _left.rank == 0


def several_ranks() -> bool:
    """Whether this process is one of several that MPI has started together."""
    return _left.size > 1


def implementation() -> str:
    """The MPI library's name and version, in a few words."""
    text = MPI.Get_library_version().replace("\0", "").strip()
    line = text.splitlines()[0]
    if line.startswith("MPICH Version"):
        return "MPICH " + line.split(":")[1].strip()
    return line.split(",")[0]
