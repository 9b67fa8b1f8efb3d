"""A run on this rank from its beginning, or a checkpoint, to its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import astuple
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..data.manifest import Manifest
from ..data.owners import Ownership, shared_out
from ..mpi import World
from ..rounds import watchers
from ..rounds.aggregate import SecureSums
from ..rounds.callback import Callback, OnRound
from ..rounds.server import Server
from ..rounds.watcher import Watcher
from ..rundir import checkpoint, claim
from ..settings import Config
from ..support.disk import WriteError
from ..support.errors import CallbackError, DivergedError, UserError
from .assemble import Session, root_only_serves
from .banner import Banner
from .console import Progress, closing_lines
from .journal import Journal
from .run_data import RunData
from .secure_rounds import Contributors


class Training:
    """The course of a run; ``recovery`` has one that goes on where ranks are lost.

    >>> training = Training(world, config, directory, start=0)
    >>> training.run()
    'finished'
    >>> training.session.trained_module()
    """

    session: Session

    def __init__(
        self,
        world: World,
        config: Config,
        directory: Path,
        start: int,
        on_round: OnRound | None = None,
        quiet: bool = False,
        silos: RunData | None = None,
    ):
        """To go on after round ``start`` (0: a new run), with the shards in ``directory``, or those of ``silos``."""
        self.silos = silos
        self.world, self.config, self.directory, self.start = world, config, directory, start
        self.on_round, self.quiet = on_round, quiet
        # No method: the session has it, too, and both would wait for the garbage collector, with files and GPU memory.
        self.print: Callable[[str], None] = _discard if quiet else partial(print, flush=True)
        self.out = Path(config.out)

    def run(self) -> str:
        """To the end; finished or stopped."""
        world = self.world
        self.session = Session(world, self.config, self.directory, self.start, self.owners, self.print, self.silos)
        silo = self.session.silo
        if isinstance(silo.aggregation, SecureSums) and self.session.masked:
            silo.aggregation.permit = Contributors(self.session).check
        world.on_root(self._refuse_few_contributors)
        sums_changed = self.restore()
        if (folder := silo.folder) is not None:
            world.collectively(lambda: folder.begin(self.start))
        world.barrier()
        silo.share((*silo.sent, *silo.algorithm.derived))
        journal = world.on_root(self.journal)
        silo.watchers = self.watchers(journal)
        with ExitStack() as stack:
            stack.callback(silo.watchers.clear)  # some of which refer to the silo
            for watcher in silo.watchers:
                stack.callback(watcher.close)
            stack.callback(silo.checkpoints.close)
            try:
                return self._course(journal, sums_changed)
            except (UserError, DivergedError):  # on all ranks
                silo.checkpoints.settle()
                raise

    def _course(self, journal: Journal | None, sums_changed: str) -> str:
        """All rounds; the root has a ``journal``."""
        world, memory = self.world, self._memory()
        if journal is None:
            return self.session.silo.serve()
        try:
            status = self._serve(journal, memory, sums_changed)
        except (WriteError, CallbackError) as error:  # on the root alone, while the others wait for an order
            world.broadcast_json({"do": "fail", "message": str(error)})
            raise
        world.broadcast_json({"do": "end", "status": status})
        return status

    def _memory(self) -> np.ndarray:
        """What every rank needs, a row each, on the root; with --secure only what it needs itself."""
        mine = astuple(self.session.silo.memory)
        if not self.config.secure:
            return self.world.gather(mine)
        rows = np.zeros((self.world.size, len(mine)))
        rows[0] = mine
        return rows

    def owners(self, manifest: Manifest) -> Ownership:
        if self.silos is not None and self.silos.owners is not None:
            return self.silos.owners
        servers = int(root_only_serves(self.world, self.config))
        return shared_out(manifest, self.world.size, servers, self.config.silo_per_rank)

    def restore(self) -> str:
        """The vectors of the server and the state of the clients; on the root, how the order of sums has changed."""
        world, session, silo, start = self.world, self.session, self.session.silo, self.start
        if not start:
            world.on_root(self._begin)
            return ""
        clients = set(silo.trainer.data.client_ids.tolist())
        state = silo.trainer.client_state.vectors
        world.on_root(lambda: checkpoint.refuse_other_digests(self.out, start, silo.digests, session.manifest.root))
        if (folder := silo.folder) is None:
            world.collectively(lambda: checkpoint.load(self.out, start, silo.s, state, clients, world))
            world.collectively(session.load_own_state)
        else:  # a silo need not be able to read the run's directory
            world.on_root(lambda: checkpoint.load(self.out, start, silo.s, {}, set(), world))
            world.collectively(lambda: folder.load(start, silo.s.x, state, clients))
        return world.on_root(self._after_loading) or ""

    def _begin(self) -> None:
        self.session.begin()
        claim.clear(self.out)  # not before everything that could be refused has been read

    def _after_loading(self) -> str:
        silo = self.session.silo
        before, now = checkpoint.order_of_sums(self.out, self.start), silo.aggregation.order
        changed = {name: before[name] for name in now if before.get(name, now[name]) != now[name]}
        checkpoint.remove_unfinished(self.out)
        previous = checkpoint.read_more(self.out, self.start, checkpoint.PREVIOUS) if self.config.diagnose else None
        if previous is not None:
            silo.x_previous.copy_(torch.from_numpy(previous))
            silo.previous_known = True
        return ", ".join(f"{name} {value} before and {now[name]} now" for name, value in changed.items())

    def journal(self) -> Journal:
        """What the root keeps."""
        return Journal(self.session)

    def watchers(self, journal: Journal | None) -> list[Watcher]:
        """On every rank."""
        return watchers.create(self.session.silo, journal.history if journal else None)

    def _serve(self, journal: Journal, memory: np.ndarray, sums_changed: str) -> str:
        """The run on the root, and all that it writes but for checkpoints."""
        self.announce(memory, sums_changed)
        with journal:
            progress = Progress(self.config.rounds, self.start, self.quiet, self.session.columns)
            own: list[Watcher] = [journal, progress, *([Callback(self.on_round)] if self.on_round else [])]
            self.session.silo.say = progress.say
            with closing(progress):
                if journal.note:
                    self.print(f"note: {journal.note}")
                self.session.silo.clock.lap()  # services take seconds to start, which are no part of the first round
                status = self.rounds(Server(self.session.silo, own))
            budget = self.session.silo.budget
            if status == "stopped" and budget is not None and not budget.permits():
                self.print(f"note: {budget.refusal}")
            summary = journal.finish(status)
            self.print(closing_lines(summary, journal.history.records, str(self.out), self.session.columns))
        return status

    def announce(self, memory: np.ndarray, sums_changed: str) -> None:
        self.print(str(Banner(self.session, memory, sums_changed)))

    def rounds(self, server: Server) -> str:
        session = self.session
        if session.void_until > self.start:
            last, first = session.void_until, self.start + 1
            rounds = f"round {last} is" if last == first else f"rounds {first} to {last} are"
            self.print(
                f"note: {rounds} void, as other silos have sent sums of the same models: the model stays. A run with "
                "another --seed has no void rounds"
            )
        if session.masked:
            contributors = Contributors(session)
            server.is_void = lambda t: t < session.void_until or contributors.are_few(t)
        return server.run(self.start)

    def _refuse_few_contributors(self) -> None:
        # Where silos are left of more, such rounds are void.
        if self.session.masked and self.world.size == self.world.original_size:
            Contributors(self.session).refuse_few()


def _discard(text: str) -> None:
    """What a quiet run prints."""
