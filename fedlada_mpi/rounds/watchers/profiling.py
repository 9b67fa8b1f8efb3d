"""Where the time of some rounds goes (``--profile``): a trace of torch's profiler on every rank, with the phases."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.autograd.profiler import profile, record_function

from ...rundir.columns import PROFILED
from ...rundir.files import PROFILES, write_atomically
from ...rundir.history import History
from ...rundir.metrics import Clock
from ...settings.checks import profiled_rounds
from ...support import disk
from ...support.errors import UserError
from .. import trace
from ..silo import Silo
from ..watcher import Finished, Order, Watcher

ITEMS = 5  # that are printed


class PhaseRanges(Clock):
    """The phases are also ranges of the trace."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with record_function(phase), super().__call__(phase):
            yield


class Profiling(Watcher):
    def __init__(self, silo: Silo, rounds: range):
        self.silo, self.rounds = silo, rounds
        self.folder = Path(silo.config.out) / PROFILES
        self.origin = 0  # of the time axis, in nanoseconds of the root's clock
        self.profiler: profile | None = None
        self.range: record_function | None = None  # of the round
        self.first = 0  # round of this start, which may go on with a run
        silo.clock = PhaseRanges()

    def order(self, order: Order) -> None:
        if order["do"] != "round" or self.first:
            return
        self.first = number = order["round"]["t"] + 1
        if number > self.rounds[-1] and not (self.folder / trace.JOINED).exists():
            asked = f"--profile {self.silo.config.profile}"
            self.silo.say(f"note: {asked} has nothing to profile, as this run goes on with round {number}")

    def ordered(self, order: Order) -> None:
        if order["do"] != "round" or order["round"]["t"] + 1 not in self.rounds:
            return
        if self.profiler is None:
            with self._untimed():
                self._begin()
        self.range = record_function(f"{trace.ROUND}{order['round']['t'] + 1}")
        self.range.__enter__()

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """What is no part of a round's seconds."""
        world = self.silo.world
        waiting = world.seconds_waiting
        yield
        world.seconds_waiting = waiting
        self.silo.clock.lap()

    def _begin(self) -> None:
        world = self.silo.world
        world.on_root(self._clear)
        world.collectively(self._start)
        self.origin = world.broadcast_json({"origin": time.time_ns()})["origin"]

    def _clear(self) -> None:
        """Remove the traces of an earlier start, which may have had more ranks."""
        with disk.writing(self.folder):
            for path in self.folder.glob(trace.FILES):
                disk.remove(path)

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes to the terminal
        # Not torch.profiler's, whose start imports torch's compiler, which takes seconds.
        device = "cuda" if self.silo.trainer.device.type == "cuda" else None
        profiler = profile(use_device=device, use_kineto=True)
        try:
            profiler.__enter__()
        except RuntimeError as error:
            raise UserError(f"--profile: torch's profiler does not start ({error}): leave it out") from None
        self.profiler = profiler

    def after(self, order: Order) -> None:
        if self.range is None:
            return
        self.range.__exit__(None, None, None)
        self.range = None
        if order["round"]["t"] + 1 == self.rounds[-1]:
            with self._untimed():
                self._finish()

    def _finish(self) -> None:
        world = self.silo.world
        mine = world.collectively(self._write)
        accounts = [trace.Account.recorded(record) for record in world.allgather_json(mine.record())]
        world.on_root(lambda: self._publish(accounts))

    def _write(self) -> trace.Account:
        """This rank's file; returns where its time went."""
        world, profiler = self.silo.world, self.profiler
        assert profiler is not None
        self.close()
        content = _exported(profiler)
        events = trace.of_rank(content, os.getpid(), world.rank, world.size, self.origin)
        with disk.writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        write_atomically(trace.rank_file(self.folder, world.rank), trace.packed(events))
        return trace.account(events, ITEMS)

    def _publish(self, accounts: list[trace.Account]) -> None:
        """On the root: one trace of all ranks, and what the slowest has spent its time on."""
        files = [trace.rank_file(self.folder, rank) for rank in range(len(accounts))]
        seen = [path for path in files if path.is_file()]  # others are on their own nodes
        write_atomically(self.folder / trace.JOINED, trace.joined(seen))
        slowest = max(range(len(accounts)), key=lambda rank: accounts[rank].busy)
        first, last = max(self.first, self.rounds[0]), self.rounds[-1]
        rounds = f"round {first}" if first == last else f"rounds {first} to {last}"
        which = f", slowest rank {slowest}" if len(accounts) > 1 else ""
        phases, *items = accounts[slowest].lines()
        missing = len(files) - len(seen)
        without = f" (without {missing} ranks, whose files are on other nodes)" if missing else ""
        where = f"  {self.folder / trace.JOINED}{without}: open it at https://ui.perfetto.dev"
        self.silo.say("\n".join([f"profile of {rounds}{which}: {phases}", *items, where]))

    def columns(self, done: Finished) -> Mapping[str, Any]:
        return {PROFILED: True} if done.r.t + 1 in self.rounds else {}

    def close(self) -> None:
        if self.profiler is not None:
            self.profiler.__exit__(None, None, None)
            self.profiler = None


def _exported(profiler: profile) -> dict[str, Any]:
    """The trace as torch writes it."""
    temporary = Path(tempfile.gettempdir())
    with disk.writing(temporary), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_bytes()
    try:
        return json.loads(text, strict=False)
    except ValueError as error:
        raise UserError(
            f"--profile: torch's trace is damaged ({error}): make room in {temporary}, then add --resume, or "
            "turn it off with --profile none"
        ) from None


def create(silo: Silo, history: History | None) -> Watcher | None:
    rounds = profiled_rounds(silo.config.profile)
    last = min(rounds.stop, silo.config.rounds + 1)
    return Profiling(silo, range(rounds.start, last)) if rounds.start < last else None
