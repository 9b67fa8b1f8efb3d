"""What a user asks for, and what the root decides from it for all ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import SETTINGS, Config, Resolved, Setting, chosen, coerce, flag, is_record, load, recorded_code
from ..settings.dp_checks import check_dp
from ..settings.fields import shown
from ..settings.privacy import check_own_data, check_secure
from ..support import code_digest, trust
from ..support.errors import PublicError, UserError, shortened
from ..support.processes import ProcessId
from ..support.user_code import Given

if TYPE_CHECKING:
    from ..data.arrays import Data
    from ..rounds.callback import OnRound
    from .run_data import SiloData


# Settings that are this rank's own, whatever the root has.
OF_RANK = ("silo_keys",)
# Those that may be others where a rank is; in all others a rank does not follow a root that has been told otherwise.
OF_PLACE = (
    *(*OF_RANK, "silo_dir", "data_dir", "out", "device", "engine", "data_on", "compile", "transport"),
    *("max_clients_at_once", "patience", "checkpoint_every", "targets", "wandb", "mlflow"),
)

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
    accept_changed_code: bool = False  # go on with a run whose code has been edited
    trust: bool = False  # run code that only the record of a run names

    @cached_property
    def silo_dir(self) -> str:
        """As it is given; empty if it is not."""
        return str(chosen("silo_dir", self.settings, {} if self.config is None else load(self.config)))

    def named_silos(self) -> Config:
        """Settings that have the names of the silos, as they are given, and nothing else."""
        return Config(silos=str(chosen("silos", self.settings, {} if self.config is None else load(self.config))))

    @property
    def given(self) -> dict[str, Any]:
        """Settings that this rank was started with, in the file or by hand."""
        return {**({} if self.config is None else load(self.config)), **self.settings}

    def resolve(self, silos: SiloData | None = None) -> tuple[Resolved, Path]:
        """All settings, and the directory of the shards; ``data`` is written there.

        ``silos``: what they have, once they have met, where each has a directory of its own.
        """
        from ..data import arrays, datasets

        file = {} if self.config is None else load(self.config)
        self.check_trust(file)
        settings = dict(self.settings)
        if self.silo_dir:
            if self.data is not None:
                raise UserError("--silo-dir has no effect on data that is given: leave one of them out")
            known = (silos.common, silos.clients) if silos else None
            resolved = datasets.resolve_silos(settings, file, self.config is not None and is_record(self.config), known)
            resolved.config.code = code_digest.of_settings(vars(resolved.config))
            return resolved, Path()
        if self.data is not None:
            settings["dataset"] = arrays.shards(self.data, {**file, **settings})
        recorded = self.config is not None and is_record(self.config)
        resolved, directory = datasets.resolve_dataset(settings, file, recorded)
        resolved.config.code = code_digest.of_settings(vars(resolved.config))
        return resolved, directory

    def check_plan(self, config: Config) -> None:
        """Refuse what the root has decided, where this rank was started with other settings, or as a silo."""
        decided, own = config.record(), self.given
        silo = own.get("secure") and coerce(SETTINGS["secure"], own["secure"])
        if silo:  # without masks it would be no such run
            own = {"secure_neighbours": SETTINGS["secure_neighbours"].default, **own}
        for name in (name for name in decided if name in own and name not in OF_PLACE):
            got = decided[name]
            expected = coerce(SETTINGS.get(name) or Setting(got, "").named(name), own[name])
            if got != expected:
                raise PublicError(
                    f"--{flag(name)}: got {shown(got)} from the server, expected {shown(expected)}, with which this "
                    "silo was started"
                )
        if self.silo_dir and not config.silo_dir:  # its own data would be left aside
            raise PublicError(
                "--silo-dir: got none from the server, expected one, as this silo was started with its own: give it "
                "to rank 0, too"
            )
        if silo:
            _refuse_of_server(decided, own)

    def of_record(self, file: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that only the record of a run gives; what users write themselves is none."""
        recorded = self.config is not None and is_record(self.config)
        return {name: value for name, value in file.items() if name not in self.settings} if recorded else {}

    def check_trust(self, file: Mapping[str, Any]) -> None:
        """Refuse code that only a record names and this user has not run; ``file`` has the settings in ``config``."""
        record = self.of_record(file)
        before = recorded_code(self.config) if self.config is not None and self.resume and record else {}
        trust.check({**file, **self.settings}, record, self.config, self.trust, before)


@dataclass(frozen=True)
class Plan:
    """What the root decides for all ranks, as JSON takes it."""

    settings: dict[str, Any]
    directory: str  # of the shards
    start: int  # the round that the run goes on after, or claim.FINISHED

    @property
    def message(self) -> dict[str, Any]:
        """The fields; ``asdict`` would copy users' objects, which may be large models, or none that can be copied."""
        return {**vars(self)}

    def config(self, request: Request) -> Config:
        # JSON has the names of objects that every rank was given.
        given = {name: value for name, value in request.settings.items() if isinstance(value, Given)}
        own = request.given
        here = {name: coerce(SETTINGS[name], own[name]) for name in OF_RANK if name in own}
        return Config(**{**self.settings, **given, **here})


def make(request: Request, at_end: ExitStack, gone: Container[ProcessId] = (), silos: SiloData | None = None) -> Plan:
    """On the root. Unless there is nothing left to do, it holds the output directory until the end of the run.

    ``gone``: processes that hold it no longer. ``silos``: see ``Request.resolve``.
    """
    from ..rundir import claim, lock, results

    resolved, directory = request.resolve(silos)
    config, out = resolved.config, Path(resolved.config.out)
    if not out.exists():
        at_end.callback(_remove_if_empty, out)  # where the run is refused before it writes anything
    asked = (request.resume, request.overwrite, request.accept_changed_code)
    start = claim.claim(config, *asked)
    if start != claim.FINISHED:
        at_end.enter_context(lock.hold(out, gone=gone))
        # Again, as another run may have written there until now.
        start = claim.claim(config, *asked)
    if start == claim.FINISHED and not request.quiet:
        done = f"{results.finished_rounds(out)} rounds of {config.rounds}"
        print(f"{out} is finished: {done}; --resume {out} --rounds N goes on")
    return Plan(vars(config), str(directory), start)


@contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """For runs that cannot share a process: MPI's order of calls, captured graphs and torch's profiler belong to all of
    its threads."""
    if not _running.acquire(blocking=False):
        raise UserError(f"another training of this process is running, and {what} takes one at a time: wait for it")
    try:
        yield
    finally:
        _running.release()


def _refuse_of_server(decided: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse what no silo was asked for: code that the server names, and what shows a single silo or client."""
    for name, code in code_digest.named(decided).items():
        if name not in own:
            raise PublicError(f"--{flag(name)}: the server asks for {shortened(code)}, which no silo runs unasked")
    try:
        check_secure(decided, frozenset())
        check_dp(decided, frozenset())
        check_own_data(decided)
    except UserError as error:
        raise PublicError(f"the server asks for what a silo does not do: {error}") from None


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()
