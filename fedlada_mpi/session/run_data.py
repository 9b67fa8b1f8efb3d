"""Where the examples of a run come from: shards that all ranks read, or a directory of each silo's own.

Either says what all ranks know of the data (``manifest``), and loads what this rank has.
"""

from __future__ import annotations

import os
import platform
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..data.datasets import ensure
from ..data.manifest import Manifest, read_manifest
from ..data.owners import Ownership
from ..data.shards import check_files, files_of
from ..data.silos.agreement import as_agreed, digest, joined, numbers_of, shared_manifest, with_statistics
from ..data.silos.files import Public, SiloManifest, normalised, read_private
from ..data.silos.sums import SumOf, Sums, agree_statistics
from ..mpi import World
from ..privacy.names import own_name
from ..privacy.silo_files import LOG
from ..rounds.batches import LocalData, local_steps
from ..rounds.examples import Examples
from ..rounds.sizes import OwnSizes, Sizes
from ..rundir import checkpoint
from ..rundir.silo_folder import RUNS, SiloFolder, added_up_with_others, log_error
from ..settings import Config
from ..support.errors import PublicError, UserError, some
from .loading import Loading

RUN = "silo_run"  # in a checkpoint: what the folders of the run in the silos' directories end with

PIXELS = (0.5, 0.5)  # mean and deviation where those of the silos' images must stay there
WITHOUT_NOISE = (
    "with --dp, results on the silos' test rows stay in their own metrics.jsonl, and images are normalised by 0.5 and "
    "0.5: no noise protects them"
)
ADDED_UP_BEFORE = (
    "some silos have agreed on a mean with other silos before: who knows both sums knows the number of rows, the mean "
    "and the deviation of those that came or went"
)


class RunData(ABC):
    manifest: Manifest  # what every rank knows
    owners: Ownership | None = None  # where ranks cannot choose which clients they have
    run_id: str = ""  # where it has folders in several places
    folder: SiloFolder | None = None  # of this rank's silo, where that keeps what is its own
    notes: Sequence[str] = ()  # for the banner
    in_silos = False  # whether no rank knows the sizes of others' clients

    silo_name: str = ""  # of this rank, as its data has it
    log_folder: Path | None = None  # where a silo writes what it alone may know of all its runs

    @abstractmethod
    def open(self, world: World, config: Config) -> None:
        """Find out what there is; collective."""

    @abstractmethod
    def settle(self, world: World, config: Config, sum_of: SumOf | None = None) -> None:
        """Agree on what follows from the data of all; collective. ``sum_of``: over all ranks, masked or not."""

    @property
    @abstractmethod
    def own_digest(self) -> str:
        """Of the data that this rank's clients train on."""

    @abstractmethod
    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        """Training examples of this rank's clients, which are all of a silo's own."""

    @property
    @abstractmethod
    def all_rows(self) -> int:
        """Training examples of all clients."""

    @property
    @abstractmethod
    def readable(self) -> Manifest:
        """The manifest that this rank reads files by."""

    @abstractmethod
    def verify(self, world: World, owners: Ownership) -> None:
        """Compare the checksums of the files that this rank reads."""

    @abstractmethod
    def of_clients(self, world: World, owners: Ownership, loading: Loading) -> LocalData:
        """The examples of this rank's clients."""

    @abstractmethod
    def held_out(self, world: World, loading: Loading) -> dict[str, Examples]:
        """What belongs to no client; collective."""

    @abstractmethod
    def sizes(self) -> Sizes:
        """Of clients."""

    @abstractmethod
    def most_rows(self, config: Config) -> int:
        """Of a client, or those of a batch where nobody knows."""


class SharedShards(RunData):
    """Shards in a directory that all ranks read."""

    def __init__(self, directory: Path, silos: int, report: Callable[[str], None]):
        self.directory, self.silos, self.report = directory, silos, report

    def open(self, world: World, config: Config) -> None:
        world.on_root(lambda: ensure(config, self.directory, self.silos, self.report))
        self.manifest = world.collectively(lambda: read_manifest(self.directory))

    def settle(self, world: World, config: Config, sum_of: SumOf | None = None) -> None:
        """The manifest has everything."""

    @property
    def own_digest(self) -> str:
        return self.manifest.digest

    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        return self.manifest.sizes[clients]

    @property
    def all_rows(self) -> int:
        return int(self.manifest.sizes.sum())

    @property
    def readable(self) -> Manifest:
        return self.manifest

    def verify(self, world: World, owners: Ownership) -> None:
        """Of files that ranks of this node need: of each file, the first rank that needs it."""
        files = {rank: files_of(self.manifest, owners.clients_of[rank]) for rank in world.neighbours}
        first = {name: rank for rank in reversed(world.neighbours) for name in files[rank]}
        check_files(self.manifest, [name for name, rank in first.items() if rank == world.rank])

    def of_clients(self, world: World, owners: Ownership, loading: Loading) -> LocalData:
        return loading.of_clients(owners.clients_of[world.rank])

    def held_out(self, world: World, loading: Loading) -> dict[str, Examples]:
        return world.on_root(loading.of_nobody) or {}

    def sizes(self) -> Sizes:
        return Sizes(self.manifest.sizes)

    def most_rows(self, config: Config) -> int:
        return int(self.manifest.sizes.max())


@dataclass(frozen=True)
class Member:
    """What the ranks know of a silo."""

    public: Public
    clients: int
    host: str
    account: int  # the number of the user that its rank runs as

    @classmethod
    def parsed(cls, rank: int, item: Any) -> Member:
        """From what a rank says; it may be anything."""
        try:
            clients, account = int(item["clients"]), int(item["account"])
            if not 1 <= clients <= 1 << 20:
                raise ValueError(f"{clients} clients")
            return cls(Public.parsed(item["public"]), clients, str(item["host"])[:64], account)
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise PublicError(f"rank {rank} describes no silo ({error}): expected that of data_prep") from None


def _check_passed_on(items: Sequence[Any], mine: Any) -> None:
    """By what all say of themselves, a silo knows whose clients take part in a round."""
    if mine not in items:
        raise PublicError("--silo-dir: the server has not passed on what this silo says of itself as it is")


class SiloData(RunData):
    """A directory for each silo, which its rank alone reads; made once for a run, however often its ranks regroup.

    >>> data = SiloData(world, "/secure/{silo}", Config(silos="berlin,oslo"))   # the silos meet
    >>> data.common, data.clients                                               # for the settings of the run
    >>> data.open(world, config)
    """

    in_silos = True

    def __init__(self, world: World, pattern: str, config: Config):
        """``config``: of which only the names of the silos count."""
        if world.original_size < 2:
            raise PublicError("--silo-dir: got one rank, which is the server, expected a rank for each silo, too: -n 4")
        self.own: SiloManifest | None = world.collectively(lambda: self._own(world, pattern, config))
        mine: dict[str, Any] = {}
        if self.own is not None:
            mine = {"public": Public.of(self.own).record(), "clients": self.own.clients}
            mine |= {"host": platform.node(), "account": os.geteuid()}
        items = world.allgather_json(mine)
        world.collectively(lambda: _check_passed_on(items, mine) if mine else None)
        members = [Member.parsed(rank, item) for rank, item in enumerate(items) if item]
        if not members:
            raise PublicError("--silo-dir: got no rank with data, expected one for each silo")
        # By name: a silo may be on another rank when the run is resumed.
        self.members = sorted(members, key=lambda member: member.public.name)
        self.common = joined([member.public for member in self.members])
        self.steps: float | None = None  # the mean over all clients, once the silos have added up theirs

    @property
    def clients(self) -> int:
        return sum(member.clients for member in self.members)

    def _own(self, world: World, pattern: str, config: Config) -> SiloManifest | None:
        """What this rank's directory has; None on the server."""
        rank = world.original_ranks[world.rank]
        if rank == 0:
            return None
        if not pattern:
            raise PublicError(f"rank {rank}: got no --silo-dir, expected one on every rank")
        name = own_name(config, rank - 1, world.original_size - 1) if "{silo}" in pattern else ""
        directory = Path(pattern.replace("{silo}", name))
        try:
            found = stat.S_ISDIR(os.stat(directory).st_mode)
        except PermissionError:
            raise PublicError(
                f"--silo-dir: rank {rank} must not read {directory}, which belongs to another account: give the names "
                "of the silos in the order of their ranks by --silos, or each its own by FEDLADA_SILO"
            ) from None
        except OSError:
            found = False
        if not found:
            raise PublicError(
                f"--silo-dir: rank {rank} has no directory {directory}: prepare it with python -m data_prep --silo "
                f"{name or 'NAME'} --out {directory}, or give the names of the silos by --silos or FEDLADA_SILO"
            )
        own = self._told_to_the_silo(directory, lambda: read_private(directory))
        if name and own.silo != name:
            raise PublicError(
                f"--silo-dir: {directory} has the silo {own.silo}, expected {name}: prepare it with --silo {name}"
            )
        return own

    def _told_to_the_silo(self, directory: Path, action: Callable[[], Any]) -> Any:
        """Other ranks learn that data is refused, but not why: that may say how much there is of it."""
        try:
            return action()
        except UserError as error:
            why = f"{directory / LOG} says why" if log_error(directory / LOG, str(error)) else "prepare it again"
            raise PublicError(f"--silo-dir: the data in {directory} is damaged or cannot be used: {why}") from None

    @cached_property
    def index(self) -> int:
        """This rank's silo among those of the run, by name; -1 on the server."""
        names = [member.public.name for member in self.members]
        return names.index(self.own.silo) if self.own else -1

    @property
    def first(self) -> int:
        """The number of this silo's first client among all."""
        return sum(member.clients for member in self.members[: max(0, self.index)])

    def open(self, world: World, config: Config) -> None:
        if config.clients != self.clients:
            raise PublicError(
                f"--silo-dir: the silos have {self.clients} clients, and the run began with {config.clients}: resume "
                "it with the same silos, or choose another --out"
            )
        self.manifest = shared_manifest(self.common, [member.clients for member in self.members])
        self.owners = self._owners(world)
        self.run_id = self._run_id(world, config)
        own, path = self.own, None
        if own is not None:
            self.silo_name, self.log_folder = own.silo, own.root
            path = own.root / RUNS / f"{Path(os.path.abspath(config.out)).name}-{self.run_id}"
        self.folder = SiloFolder(path, own.digest if own else "")
        self.notes = self._notes()

    def settle(self, world: World, config: Config, sum_of: SumOf | None = None) -> None:
        if self.steps is None:  # not again without a silo that was lost: the difference of the sums would be its own
            self._add_up(world, config, sum_of)
        self.manifest = with_statistics(self.manifest, self.statistics)
        own = self.own
        self.local = with_statistics(as_agreed(own, self.common), self.statistics) if own else self.manifest

    def _add_up(self, world: World, config: Config, sum_of: SumOf | None) -> None:
        own, pooled = self.own, normalised(self.common)
        if config.dp != "none":
            self._without_sums(config, pooled)
            return
        if sum_of is not None:
            others = digest([member.public.name for member in self.members])
            before = world.collectively(lambda: added_up_with_others(own.root, own.digest, others) if own else False)
            if world.allreduce_min([-int(before)])[0]:
                self.notes = (*self.notes, ADDED_UP_BEFORE)
        steps = int(local_steps(config, own.sizes).sum()) if own else 0
        rows = int(own.sizes.sum()) if own else 0
        total = (sum_of or world.sum_integers)(np.array([steps, rows], np.int64)).tolist()
        self.steps, self.rows = total[0] / self.clients, total[1]
        mine = own.sums if own else {name: Sums.nothing(columns) for name, columns in pooled.items()}
        self.statistics = agree_statistics(world, mine, sum_of, self.common.image)

    def _without_sums(self, config: Config, pooled: Mapping[str, int]) -> None:
        """Noise protects what clients send, but not the sums of all rows."""
        if pooled and not self.common.image:
            raise PublicError(
                "--dp: the silos' data is to be normalised by the mean of all rows, which no noise protects: prepare "
                "it with --normalise none or client"
            )
        self.steps, self.rows = float(config.local_steps), 0
        self.statistics = {name: (PIXELS[:1] * columns, PIXELS[1:] * columns) for name, columns in pooled.items()}
        self.notes = (*self.notes, WITHOUT_NOISE)

    @property
    def own_digest(self) -> str:
        return self.own.digest if self.own else ""

    def sizes_of(self, clients: np.ndarray) -> np.ndarray:
        return self.own.sizes if self.own else np.empty(0, np.int64)

    @property
    def all_rows(self) -> int:
        return self.rows

    def _owners(self, world: World) -> Ownership:
        """The clients of each rank that is there; a silo may have been lost."""
        index = world.gather([self.index])[:, 0].astype(int).tolist()
        index = world.broadcast_json({"index": index})["index"]
        world.collectively(lambda: _check_passed_on(index[world.rank : world.rank + 1], self.index))
        nobody = np.empty(0, np.int64)
        owned = self.manifest.client_ids
        return Ownership([owned[i] if i >= 0 else nobody for i in index], [i < 0 for i in index])

    def _run_id(self, world: World, config: Config) -> str:
        def known() -> dict[str, str]:
            saved = checkpoint.attribute(Path(config.out), RUN) if not self.run_id else ""
            return {"id": self.run_id or saved or secrets.token_hex(4)}

        found = str(world.broadcast_json(world.on_root(known))["id"])
        if not (found.isalnum() and len(found) <= 64):
            raise PublicError(f"{config.out}: its checkpoint names the run {found!r}, expected letters and digits")
        return found

    def _notes(self) -> list[str]:
        """Who could read whose data, whatever the software does."""
        together: dict[tuple[str, int], list[str]] = {}
        for member in self.members:
            together.setdefault((member.host, member.account), []).append(member.public.name)
        notes = []
        for (host, account), names in together.items():
            if len(names) > 1:
                notes.append(
                    f"silos {some(names)} run as the same account ({account}) on {host}: nothing protects their data "
                    "and memory from each other there; an account and a node for each would"
                )
        hosts: dict[str, list[str]] = {}
        accounts: dict[int, list[str]] = {}
        for (host, account), names in together.items():
            hosts.setdefault(host, []).extend(names)
            accounts.setdefault(account, []).extend(names)
        for account, names in accounts.items():
            if sum(number == account for _, number in together) > 1:
                notes.append(
                    f"silos {some(names)} run as account {account} on several machines: where that is one account, "
                    "it can read the files of all that these machines share"
                )
        for host, names in hosts.items():
            apart = sum(where == host for where, _ in together) > 1
            if len(names) > 1 and apart:
                notes.append(f"silos {some(names)} share {host}: whoever administers it can read the data of all")
        return notes

    @property
    def readable(self) -> Manifest:
        return self.local

    def verify(self, world: World, owners: Ownership) -> None:
        own = self.own
        if own is not None:
            self._told_to_the_silo(own.root, lambda: check_files(own, list(own.files)))

    def of_clients(self, world: World, owners: Ownership, loading: Loading) -> LocalData:
        own = self.own
        if own is None:
            return loading.of_clients([])
        ids = np.arange(own.clients)
        data: LocalData = self._told_to_the_silo(own.root, lambda: loading.of_clients(ids))
        return replace(data, client_ids=ids + self.first, numbers=numbers_of(self.index, own.clients))

    def held_out(self, world: World, loading: Loading) -> dict[str, Examples]:
        own = self.own

        def read() -> dict[str, Examples]:
            return self._told_to_the_silo(own.root, loading.of_nobody) if own else {}

        return world.collectively(read)

    def sizes(self) -> Sizes:
        known = np.zeros(self.clients, np.int64)
        if self.own is not None:
            known[self.first : self.first + self.own.clients] = self.own.sizes
        assert self.steps is not None
        return OwnSizes(known, self.steps)

    def most_rows(self, config: Config) -> int:
        return config.batch_size
