"""A run from what was asked for to its end; the command and ``fedlada_mpi.train`` both start here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..settings import Config
from .plan import Request, one_at_a_time

if TYPE_CHECKING:
    from ..mpi import World
    from .assemble import Session


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
    # After MPI: a wrong launcher is reported without waiting for torch.
    from ..mpi import World, several_ranks

    # Before the ranks wait for each other.
    alone = one_at_a_time("a world of several ranks") if several_ranks() else nullcontext()
    with alone, ExitStack() as at_end, World() as world, ExitStack() as around:
        from .recovery.attempts import Attempts

        attempts = Attempts(request, world, at_end, around)
        attempts.run()
        yield Launched(world, attempts.config, attempts.status, attempts.session)
