"""A training whose ranks may be lost, and that goes on without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...data.manifest import Manifest
from ...data.owners import Ownership, owned_clients, shared_out
from ...rounds.server import Server
from ...rounds.watcher import Finished, Watcher
from ...rundir import checkpoint
from ...rundir.best import Best
from ...rundir.client_values import ClientValues
from ...rundir.history import History
from ...support.errors import UserError
from ...support.signals import stop_requested
from ..assemble import root_only_serves
from ..console import plural
from ..journal import Journal
from ..training import Training
from .snapshot import Snapshot


class Departure(NamedTuple):
    """A rank that was lost."""

    rank: int  # in the world that the run began with
    host: str
    after: int  # round


def owners_left(
    manifest: Manifest,
    original_ranks: Sequence[int],
    original_size: int,
    servers: int,
    silo_per_rank: bool = False,
    adopt: bool = False,
) -> Ownership:
    """Who trains which clients, once only ``original_ranks`` are left of ``original_size``.

    The first ``servers`` only served. The clients of lost ranks belong to nobody, or with ``adopt`` all are shared out
    again.
    """
    only_serves = [rank < servers for rank in original_ranks]
    if not adopt or len(original_ranks) == original_size:
        owned = shared_out(manifest, original_size, servers, silo_per_rank).clients_of
        return Ownership([owned[rank] for rank in original_ranks], only_serves)
    trains = [not serves for serves in only_serves]
    if not any(trains):
        trains = [True] * len(original_ranks)
    shares = iter(owned_clients(manifest, sum(trains), silo_per_rank))
    return Ownership([next(shares) if own else np.empty(0, np.int64) for own in trains], only_serves)


class _Recorded(Watcher):
    """Names the lost ranks in the record of the first round without them."""

    def __init__(self, departures: Sequence[Departure]):
        self.ranks = [departure.rank for departure in departures]

    def columns(self, done: Finished) -> Mapping[str, Any]:
        ranks, self.ranks = self.ranks, []
        return {"left": ranks} if ranks else {}


class SurvivableTraining(Training):
    """With a snapshot on every rank; after ``departures`` it goes on from the last one, if there is one."""

    def __init__(self, *about: Any, snapshot: Snapshot | None = None, departures: Sequence[Departure] = ()):
        """``about``: as in ``Training``."""
        super().__init__(*about)
        self.from_snapshot, self.departures = snapshot, departures
        self.snapshot: Snapshot | None = None  # of the last round that is done
        self.stops = ""  # why the run is to stop here

    def owners(self, manifest: Manifest) -> Ownership:
        world, config = self.world, self.config
        servers = int(root_only_serves(world, config))
        ranks = (world.original_ranks, world.original_size, servers)
        if self.silos is not None and self.silos.owners is not None:
            owners = self.silos.owners
        else:
            owners = owners_left(manifest, *ranks, config.silo_per_rank, config.adopt)
        # Whoever ends a job may end some ranks before the others.
        unfinished = bool(self.departures) and self.start < config.rounds
        self.asked_to_stop = unfinished and not world.all_ranks(not stop_requested())
        self.stops = "asked to stop" if self.asked_to_stop else self._too_few(owners)
        return owners

    def _too_few(self, owners: Ownership) -> str:
        """That so few silos are left that the run is to stop; empty if it is not. On all ranks alike."""
        silos = sum(len(clients) > 0 for clients in owners.clients_of)
        few = f"{plural(silos, 'silo')} left, and --min-silos is {self.config.min_silos}"
        if self.config.secure and 0 not in self.world.original_ranks:  # a silo in its place would see the others' sum
            few = "the server left, whose place no silo takes with --secure"
        elif not self.departures or silos >= self.config.min_silos:
            return ""
        if not self.start:
            raise UserError(f"{few}: start again, there is no round to go on from")
        return few

    @property
    def lost_clients(self) -> np.ndarray:
        """Clients that no rank has any more."""
        return np.flatnonzero(~self.session.silo.owned)

    def restore(self) -> str:
        if self.from_snapshot is None:
            return super().restore()
        self.from_snapshot.restore(self.session.silo)
        if self.from_snapshot.state:
            self.world.on_root(self._keep_state_of_lost_clients)
        return ""

    def _keep_state_of_lost_clients(self) -> None:
        """As it was at the last checkpoint, for a later resume."""
        silo = self.session.silo
        if saved := checkpoint.complete(self.out):
            state, lost = silo.trainer.client_state.vectors, set(self.lost_clients.tolist())
            checkpoint.load_state(saved[-1], silo.s.x, state, lost)

    def journal(self) -> Journal:
        about: dict[str, Any] = {}
        if self.departures:
            left = [departure._asdict() for departure in self.departures]
            about = {"left": left, "clients_left_out": len(self.lost_clients)}
        history = self.from_snapshot.history if self.from_snapshot else None
        return Journal(self.session, history, about)

    def watchers(self, journal: Journal | None) -> list[Watcher]:
        self.snapshot = self._snapshot(journal.history if journal else None)
        return [self.snapshot, *super().watchers(journal), _Recorded(self.departures)]

    def _snapshot(self, of_root: History | None) -> Snapshot:
        """The root's history and the vectors that belong to it, on every rank."""
        world, session, silo = self.world, self.session, self.session.silo
        message = {**of_root.message(), "previous_known": silo.previous_known} if of_root else None
        known = world.broadcast_json(message)
        silo.previous_known = known["previous_known"]
        if silo.previous_known:
            silo.broadcast([silo.x_previous])
        best = None
        if session.manifest.validation:
            best = Best(self.out, 0, silo.s.x, session.network.saved, session.columns)
            if known["best"]:
                x = torch.zeros_like(silo.s.x)
                if of_root and of_root.best and of_root.best.x is not None:
                    x.copy_(of_root.best.x)
                silo.broadcast([x])
                best.restore(x, known["best"])
        clients = ClientValues.restored(self.out, session.clients, known["clients"])
        world.barrier()
        return Snapshot(silo, self.start, History.received(known, clients, best), of_root)

    def announce(self, memory: np.ndarray, sums_changed: str) -> None:
        if self.departures:
            self.print(f"note: {self._who_left()}")
        if self.from_snapshot is None:
            super().announce(memory, sums_changed)

    def _who_left(self) -> str:
        """Who left, and what becomes of their clients."""
        who = ", ".join(f"rank {departure.rank} on {departure.host}" for departure in self.departures)
        lost = len(self.lost_clients)
        clients = f"without {plural(lost, 'client')}" if lost else "with all clients"
        ranks = f"{self.world.size} of {plural(self.world.original_size, 'rank')}"
        return f"{who} left after round {self.start}: {ranks} go on, {clients}"

    def rounds(self, server: Server) -> str:
        if self.stops:
            self.print(f"note: {self.stops}: stopped, --resume {self.config.out} goes on")
            if not self.asked_to_stop or self._nothing_lost():
                server.save(self.start)
            return "stopped"
        if self.departures and self.start:
            server.save(self.start)  # fewer ranks hold it now
        return super().rounds(server)

    def _nothing_lost(self) -> bool:
        """Whether a checkpoint of what the ranks hold is that of a run without departures."""
        return self.start > 0 and not (self.session.algorithm.client_state and len(self.lost_clients))
