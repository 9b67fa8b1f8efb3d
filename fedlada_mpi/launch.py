"""A run from what was asked for to its end; the command and ``fedlada_mpi.train`` both start here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Config, Resolved, is_record, load
from .errors import UserError
from .own import Given

if TYPE_CHECKING:
    from .data.arrays import Data
    from .mpi import World
    from .server import OnRound
    from .session import Session

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
        from .data import arrays, datasets

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
    from .mpi import World, several_ranks

    # Before the ranks wait for each other.
    alone = _one_at_a_time("a world of several ranks") if several_ranks() else nullcontext()
    with alone, ExitStack() as at_end, World() as world:
        # After MPI: a wrong launcher is reported without waiting for torch.
        from .device import uses_gpu
        from .rundir import claim
        from .session import Session
        from .surroundings import unchanged

        plan = world.broadcast_json(world.on_root(lambda: _plan(request, at_end)))
        # JSON has the names of objects that every rank was given.
        given = {name: value for name, value in request.settings.items() if isinstance(value, Given)}
        config = Config(**{**plan["config"], **given})
        if plan["start"] == claim.FINISHED:
            yield Launched(world, config, "finished", None)
            return
        hint = f"--resume goes on from the last checkpoint in {config.out}; --patience sets the limit"
        world.limit_waiting(config.patience, hint, at_end.close)
        on_gpu = world.size == 1 and uses_gpu(config)
        with _one_at_a_time("a GPU") if on_gpu else nullcontext(), unchanged():
            try:
                session = Session(
                    world, config, Path(plan["directory"]), plan["start"], request.on_round, request.quiet
                )
                status = session.run()
            except SystemExit as error:
                # Python would end this rank alone and leave the others waiting; as an exception it ends all of them.
                raise RuntimeError(f"sys.exit({error.code!r}) was called during the run") from error
            yield Launched(world, config, status, session)


@contextmanager
def _one_at_a_time(what: str) -> Iterator[None]:
    """For runs that cannot share a process: MPI's order of calls, and captured graphs, belong to all of its threads."""
    if not _running.acquire(blocking=False):
        raise UserError(f"another training of this process is running, and {what} takes one at a time: wait for it")
    try:
        yield
    finally:
        _running.release()


def _plan(request: Request, at_end: ExitStack) -> dict[str, Any]:
    """What the root decides for all ranks: the settings, where the shards are, and the round to start after.

    Unless there is nothing left to do, it holds the output directory until the end of the run.
    """
    from .rundir import claim, lock, results

    resolved, directory = request.settle()
    config, out = resolved.config, Path(resolved.config.out)
    if not out.exists():
        at_end.callback(_remove_if_empty, out)  # where the run is refused before it writes anything
    start = claim.claim(config, request.resume, request.overwrite)
    if start != claim.FINISHED:
        at_end.enter_context(lock.hold(out))
        # Again, as another run may have written there until now.
        start = claim.claim(config, request.resume, request.overwrite)
    if start == claim.FINISHED and not request.quiet:
        done = f"{results.finished_rounds(out)} rounds of {config.rounds}"
        print(f"{out} is finished: {done}; --resume {out} --rounds N goes on")
    return {"config": vars(config), "directory": str(directory), "start": start}


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()
