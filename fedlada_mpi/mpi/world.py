"""The ranks of a run: how they start, how long they wait for each other, and how they end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

from mpi4py import MPI

from ..support.errors import DivergedError, UserError
from ..support.launcher import launched_processes
from ..support.start_record import report_joined, start_limit
from .heartbeat import Heartbeat, Peer
from .messages import waits
from .starting import limited
from .survivors import RankLost, Survivors, tolerant
from .wait_limit import WaitLimit

_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")

_opening = threading.Lock()  # MPI does not take two collectives on one communicator at once
_open: list[World] = []


class World(Survivors):
    """The ranks of this run, and this one's place among them; making one is collective.

    Rank 0 is the root. ``comm`` has all ranks, ``node`` those that share this rank's memory; ``Messages`` has the
    collectives, ``Survivors`` what happens when ranks are lost. An exception that nobody catches on one rank ends all.

    >>> from fedlada_mpi.mpi import World
    >>> with World() as world:
    ...     order = world.broadcast_json({"round": 3} if world.rank == 0 else None)
    ...     ranks = world.gather([world.rank])
    >>> order  # on every rank
    {'round': 3}
    >>> world.rank > 0 or ranks.tolist() == [[float(rank)] for rank in range(world.size)]
    True
    """

    _excepthook_before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]

    def __init__(self) -> None:
        _check_launcher()
        with _opening:
            with limited():
                super().__init__()
            self._excepthook_before = _open[0]._excepthook_before if _open else sys.excepthook
            _open.append(self)
            sys.excepthook = _end_all_ranks
        self.heartbeat: Heartbeat | None = None
        report_joined()

    def limit_waiting(self, seconds: int, hint: str, release: Callable[[], object]) -> None:
        """From now on, end this process if it waits for other ranks for longer than ``seconds`` (0: never), or while
        another node gives no sign of life; collective.

        The message ends with ``hint``. Before the end, ``release`` gives back what the process holds.
        """
        self.hint, self.release = hint, release

        def give_up() -> bool:
            ended = self.watchdog is not None and self.watchdog.end_stuck()
            if not ended:
                self.leave(f"has waited {seconds} s for other ranks: one of them hangs, or its node cannot be reached")
            return ended

        def missed(host: str, silent: float) -> None:
            if self.wait_limit.waiting:
                self.leave(f"waits for other ranks, and {host} has given no sign of life for {silent:.0f} s")

        self.wait_limit.close()
        self.wait_limit = WaitLimit(seconds if self.size > 1 else 0, give_up)
        self.heartbeat = self._start_heartbeat(missed) if seconds and self.size > 1 else None

    def _start_heartbeat(self, missed: Callable[[str, float], object]) -> Heartbeat | None:
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

    def shrink(self) -> None:
        if self.heartbeat:  # it would miss the nodes of lost ranks; ``limit_waiting`` starts another
            self.heartbeat.close()
            self.heartbeat = None
        super().shrink()

    def close(self) -> None:
        """Free what the ranks share; collective."""
        self._close_shared()
        self.wait_limit.close()
        for other in (self.heartbeat, self.watchdog):
            if other:
                other.close()

    @waits
    def _close_shared(self) -> None:
        # A rank that has left already counts as lost.
        with suppress(*((RankLost,) if self.tolerant else ())):
            self.barrier()
            self.at_close.close()
            with _opening:
                self._free()
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
    def local_rank(self) -> int:
        """This rank's number on its node, from the launcher where it sets one."""
        for name in _LOCAL_RANKS:
            if os.environ.get(name, "").isdigit():
                return int(os.environ[name])
        return self.node.rank


def _check_launcher() -> None:
    start_limit()
    launched = launched_processes()
    if MPI.COMM_WORLD.size == 1 and launched > 1:
        kinds = "srun --mpi=pmix (Open MPI) or srun --mpi=pmi2 (MPICH)"
        hint = kinds if "SLURM_STEP_NUM_TASKS" in os.environ else "the mpirun of the same MPI library"
        raise UserError(
            f"the launcher started {launched} processes, but MPI ({implementation()}) sees a world of 1: "
            f"start them with {hint}"
        )


def _end_all_ranks(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As ``sys.excepthook``: an exception that nobody caught is printed on this rank, and ends every rank."""
    world = _open[-1]
    world.print_failure(error)
    code = 2 if isinstance(error, UserError) else 1
    if tolerant():  # where an abort would not end the others
        if not world.fails_together and not isinstance(error, RankLost) and world.size > 1:
            os.kill(os.getpid(), signal.SIGKILL)  # they learn of a rank that was killed, not of one that has exited
        os._exit(code)
    if world.size > 1:
        world.comm.Abort(code)


def implementation() -> str:
    """The MPI library's name and version, in a few words."""
    text = MPI.Get_library_version().replace("\0", "").strip()
    line = text.splitlines()[0]
    if line.startswith("MPICH Version"):
        return "MPICH " + line.split(":")[1].strip()
    return line.split(",")[0]
