"""A run from what was asked for to its end; the command and ``fedlada_mpi.train`` both start here."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import Config, Resolved, is_record, load
from ..support.errors import DivergedError, OtherRankError, UserError
from ..support.user_code import Given

if TYPE_CHECKING:
    from ..data.arrays import Data
    from ..mpi import Member, World
    from ..rounds.server import OnRound
    from .assemble import Session
    from .held import Held, Left

_running = threading.Lock()


@dataclass(frozen=True)
class Request:
    """What a user asks for."""

    settings: Mapping[str, Any]
    config: str | os.PathLike[str] | None = None  # a file with further settings
    resume: bool = False
    overwrite: bool = False
    data: Data | None = None  # instead of the setting ``dataset``
    on_round: OnRound | None = None  # called on the root; False stops the run
    quiet: bool = False

    def settle(self) -> tuple[Resolved, Path]:
        """All settings, and the directory of the shards; ``data`` is written there."""
        from ..data import arrays, datasets

        file = {} if self.config is None else load(self.config)
        settings = dict(self.settings)
        if self.data is not None:
            settings["dataset"] = arrays.shards(self.data, {**file, **settings})
        return datasets.settle(settings, file, recorded=self.config is not None and is_record(self.config))


@dataclass(frozen=True)
class Launched:
    """A run that has ended, with its ranks still together."""

    world: World
    config: Config
    status: str  # finished or stopped
    session: Session | None  # None if there was nothing left to do


@contextmanager
def launched(request: Request) -> Iterator[Launched]:
    """Run to the end; when the block is done, everything that the run held is free again."""
    from ..mpi import World, several_ranks

    # Before the ranks wait for each other.
    alone = _one_at_a_time("a world of several ranks") if several_ranks() else nullcontext()
    with alone, ExitStack() as at_end, World() as world, ExitStack() as around:
        attempt = _Attempt(request, world, at_end, around)
        while not attempt.ended():
            pass
        yield attempt.result()


# How an attempt has ended on a rank: what all ranks agree on has the bits that each of them has.
ENDED, RANK_LOST, DEFECT = 0b11, 0b10, 0b00


class _Attempt:
    """A run on the ranks that there are; where one is lost, the others try again from what they hold."""

    def __init__(self, request: Request, world: World, at_end: ExitStack, around: ExitStack):
        self.request, self.world, self.at_end, self.around = request, world, at_end, around
        self.plan: dict[str, Any] | None = None  # the root's
        self.own_plan: dict[str, Any] | None = None  # made on this rank
        self.locked = False  # whether this rank has taken the output directory
        self.session: Session | None = None
        self.held: Held | None = None
        self.start = 0  # the round that the run goes on after
        self.left: list[Left] = []  # ranks, since then
        self.known = list(world.original_ranks)  # ranks that are left, as far as it is accounted for
        self.status = ""
        self.error: BaseException | None = None  # that all ranks raise, or one of them
        self.again = False

    def ended(self) -> bool:
        """Try; returns whether the run has ended, on all ranks alike."""
        from ..mpi import RankLost

        self.error, flags = None, ENDED
        try:
            if self.again:
                self._recover()
            self._run()
        except RankLost:
            if not self.world.tolerant:
                raise
            flags = RANK_LOST
        except (UserError, DivergedError) as error:
            self.error = error
        except Exception as error:
            if not self.world.tolerant:
                raise
            if _is_out_of_memory(error):
                self.world.die(error)
            self.error, flags = error, DEFECT
        agreed = self.world.agree(flags, ENDED)
        if agreed == DEFECT and self.error is None:
            self.error = OtherRankError()
        self.again = agreed == RANK_LOST
        return not self.again

    def result(self) -> Launched:
        if self.error is not None:
            raise self.error
        assert self.plan is not None
        return Launched(self.world, self._config(self.plan), self.status, self.session)

    def _config(self, plan: Mapping[str, Any]) -> Config:
        # JSON has the names of objects that every rank was given.
        given = {name: value for name, value in self.request.settings.items() if isinstance(value, Given)}
        return Config(**{**plan["config"], **given})

    def _run(self) -> None:
        # After MPI: a wrong launcher is reported without waiting for torch.
        from ..rounds.device import uses_gpu
        from ..rundir import claim
        from .assemble import Session
        from .torch_state import unchanged

        world, request = self.world, self.request
        if self.plan is None:
            self.plan = world.broadcast_json(world.on_root(self._plan))
            self.start = self.plan["start"]
        config = self._config(self.plan)
        if self.start == claim.FINISHED:
            self.status = "finished"
            return
        hint = f"--resume goes on from the last checkpoint in {config.out}; --patience sets the limit"
        world.limit_waiting(config.patience, hint, self.at_end.close)
        on_gpu = world.size == 1 and uses_gpu(config)
        self.around.enter_context(_one_at_a_time("a GPU") if on_gpu else nullcontext())
        self.around.enter_context(unchanged())
        directory, about = Path(self.plan["directory"]), (request.on_round, request.quiet)
        try:
            self.session = Session(world, config, directory, self.start, *about, self.held, self.left)
            self.status = self.session.run()
        except SystemExit as error:
            # Python would end this rank alone and leave the others waiting; as an exception it ends all of them.
            raise RuntimeError(f"sys.exit({error.code!r}) was called during the run") from error

    def _plan(self) -> dict[str, Any]:
        if self.own_plan is None:
            self.own_plan, self.locked = _plan(self.request, self.at_end, self._gone()), True
        return self.own_plan

    def _recover(self) -> None:
        """Agree with the ranks that are left on where to go on."""
        from .held import Left

        world = self.world
        self.around.close()
        world.shrink()
        if self.session is not None:
            self.held = self.session.silo.held or self.held
        self.session = None
        gc.collect()  # of the session, what is on the GPU
        latest = -1 if self.held is None else self.held.latest
        planned, t = world.allreduce_min([self.plan is not None, latest])
        if not planned or self.held is None or t < 0:
            self.held, t = None, self.start
        else:
            self.held.back_to(t)
        left = [Left(place, world.members[place].host, t) for place in self.known if place not in world.original_ranks]
        self.known = list(world.original_ranks)
        if not planned:  # nothing of the run is there yet
            self.plan, self.left = None, self.left + left
            return
        self.left = left if t > self.start else self.left + left
        self.start = t
        world.on_root(self._take_over)
        assert self.plan is not None
        if self.plan["config"]["adopt"] and self.held and self.held.state:
            # What clients of lost ranks kept is in the checkpoints alone.
            self.start = world.broadcast_json(world.on_root(self._last_checkpoint))["start"]
            self.held = None

    def _gone(self) -> set[Member]:
        """The processes of lost ranks."""
        return {member for place, member in enumerate(self.world.members) if place not in self.world.original_ranks}

    def _take_over(self) -> None:
        """Hold the output directory, if another rank did."""
        from ..rundir import lock

        assert self.plan is not None
        out = Path(self.plan["config"]["out"])
        if not self.locked:
            self.at_end.enter_context(lock.hold(out, gone=self._gone()))
            self.locked = True
        elif not lock.is_mine(out):
            raise UserError(f"the other ranks have lost this one, and go on in {out} without it")

    def _last_checkpoint(self) -> dict[str, int]:
        from ..rundir import checkpoint

        assert self.plan is not None
        config = self._config(self.plan)
        return {"start": checkpoint.latest(Path(config.out), config)}


def _is_out_of_memory(error: Exception) -> bool:
    """Whether this rank's machine has no memory left: the others may go on."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


@contextmanager
def _one_at_a_time(what: str) -> Iterator[None]:
    """For runs that cannot share a process: MPI's order of calls, and captured graphs, belong to all of its threads."""
    if not _running.acquire(blocking=False):
        raise UserError(f"another training of this process is running, and {what} takes one at a time: wait for it")
    try:
        yield
    finally:
        _running.release()


def _plan(request: Request, at_end: ExitStack, gone: set[Member]) -> dict[str, Any]:
    """What the root decides for all ranks: the settings, where the shards are, and the round to start after.

    Unless there is nothing left to do, it holds the output directory until the end of the run; processes that are
    ``gone`` do not.
    """
    from ..rundir import claim, lock, results

    resolved, directory = request.settle()
    config, out = resolved.config, Path(resolved.config.out)
    if not out.exists():
        at_end.callback(_remove_if_empty, out)  # where the run is refused before it writes anything
    start = claim.claim(config, request.resume, request.overwrite)
    if start != claim.FINISHED:
        at_end.enter_context(lock.hold(out, gone=gone))
        # Again, as another run may have written there until now.
        start = claim.claim(config, request.resume, request.overwrite)
    if start == claim.FINISHED and not request.quiet:
        done = f"{results.finished_rounds(out)} rounds of {config.rounds}"
        print(f"{out} is finished: {done}; --resume {out} --rounds N goes on")
    return {"config": vars(config), "directory": str(directory), "start": start}


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()
