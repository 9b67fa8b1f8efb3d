"""Rounds of a run that are trained to be timed, and recorded nowhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...rounds import watchers
from ...rounds.device import synchronize
from ...rounds.server import Server
from ...rounds.watcher import Order, Watcher
from ...rundir.client_values import ClientValues
from ...rundir.columns import PARTS
from ...rundir.history import History
from ...rundir.provenance import Segments
from ...support.errors import UserError
from ..assemble import Session
from ..recovery.snapshot import Snapshot
from .extrapolation import Due, Measured
from .forecast import PlannedRounds, samples

ROUND_SECONDS = 4.0  # of a timed round, beyond which it is cut to fewer steps
EVALUATION_SECONDS = 10.0  # of a timed evaluation, beyond which a batch stands for it
BUDGET = 45.0  # seconds after which no further repetition begins
REPEATS = 5


class Probe(Watcher):
    """On every rank, next to the watchers that a run has; the root calls ``round``, the others serve.

    >>> with probe.serving():
    ...     probe.round(t=3, steps=2)["train"]      # cut to two local steps
    """

    def __init__(self, session: Session):
        self.silo, self.world = session.silo, session.world
        self.config = session.silo.trainer.config
        self.seconds: dict[str, float] = {}  # of the last round, by phase
        self.slowest = 0.0  # of the last evaluation
        history, silo = _nothing(session), session.silo
        of_root = history if session.world.rank == 0 else None
        kept = [Snapshot(silo, 0, _nothing(session), of_root)] if session.world.tolerant else []
        silo.watchers = [*kept, *watchers.create(silo, of_root), self]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """On the root; at the end, or for an error here, the other ranks stop serving."""
        self.server = Server(self.silo)
        try:
            yield
        except UserError as error:
            self.world.broadcast_json({"do": "fail", "message": str(error)})
            raise
        self.world.broadcast_json({"do": "end", "status": "estimated"})

    def round(self, t: int, steps: int = 0) -> dict[str, float]:
        """The seconds of a round by phase, of the slowest rank; ``steps``: of every client, 0: of its own."""
        self.server.order({"do": "void", "t": t, "steps": steps})
        self.silo.clock.lap()
        if self.server.round(t):
            raise UserError("--estimate was stopped")
        return self.seconds

    def evaluation(self, due: Sequence[str]) -> float:
        """Seconds of the slowest rank."""
        self.server.order({"do": "void", "evaluate": list(due)})
        return self.slowest

    def order(self, order: Order) -> None:
        if order["do"] == "round":
            order["evaluate"] = []

    def ordered(self, order: Order) -> None:
        if order["do"] == "void" and "evaluate" in order:
            self._evaluate(order["evaluate"])
        elif order["do"] == "void":
            self._prepare(order["t"], order["steps"])

    def _evaluate(self, due: list[str]) -> None:
        self.world.barrier()
        start = time.perf_counter()
        self.silo.evaluations(due)
        synchronize(self.silo.trainer.device)
        self.slowest = float(self.world.gather([time.perf_counter() - start]).max(initial=0.0))

    def _prepare(self, t: int, steps: int) -> None:
        """For a round of so many steps."""
        trainer = self.silo.trainer
        trainer.config = replace(self.config, local_steps=steps) if steps else self.config
        trainer.ahead = (-1, [], None)
        if trainer.plans_ahead:  # as the round before would have done
            trainer.plan_ahead(t)
        self.world.barrier()

    def recorded(self, record: dict[str, Any]) -> None:
        self.seconds = record["seconds"]


def _nothing(session: Session) -> History:
    """Of a run before its first round."""
    values = ClientValues(Path(session.config.out), 0, session.clients)
    return History([], Segments([], 0, "", {}), values, None)


def measure(probe: Probe, here: PlannedRounds, counted: Counter[Due], batches: np.ndarray) -> Measured:
    """On the root: rounds with most, with median and with least work, and what is evaluated after rounds.

    ``batches``: what evaluations of each part will take at least, by rank.
    """
    began = time.perf_counter()
    chosen = samples(here.works()) or [0]
    largest = chosen[0]
    cold, one = (probe.round(largest, steps=1)["total"] for _ in range(2))
    cuts = _cuts(one, int(max(here.steps[here.participants(largest)], default=1)))
    points = [(t, cut) for t in (chosen if one < ROUND_SECONDS else chosen[:1]) for cut in cuts]
    warm = {(t, cut): probe.round(t, steps=cut)["total"] for t, cut in points if t != largest or not cut}
    timed: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    phases: dict[str, float] = {}
    for repeat in range(REPEATS):
        if repeat and time.perf_counter() - began > BUDGET:
            break
        for t, cut in points:
            seconds = probe.round(t, steps=cut)
            timed[t, cut].append(seconds["total"])
            if t == largest:
                phases = seconds
    captures = [(warm[point] - median(timed[point]), here.running(*point)) for point in warm]
    evaluations, late = {}, 0.0
    for due in counted:
        expected = float(batches[:, [PARTS.index(part) for part in due]].sum(1).max())
        if expected > EVALUATION_SECONDS:
            evaluations[due] = [expected]
            continue
        first = probe.evaluation(due)
        repeats = REPEATS if REPEATS * first < EVALUATION_SECONDS else 1
        evaluations[due] = [probe.evaluation(due) for _ in range(repeats)]
        late += max(0.0, first - median(evaluations[due]))
    return Measured(
        rounds=[(here.work(t, cut), seconds) for (t, cut), seconds in timed.items()],
        phases=phases,
        first=max(0.0, cold - one),
        capture=_per_graph(captures, here.running(largest, 1)),
        evaluations=evaluations,
        first_evaluations=late,
    )


def _per_graph(longer: Sequence[tuple[float, set[int]]], known: set[int]) -> float:
    """Seconds by which a round takes longer for each graph that is not ``known`` before it."""
    seconds, graphs = 0.0, 0
    for more, running in longer:
        if new := running - known:
            seconds, graphs = seconds + max(0.0, more), graphs + len(new)
        known = known | running
    return seconds / graphs if graphs else 0.0


def _cuts(one: float, steps: int) -> list[int]:
    """To how many steps rounds are cut (0: they are not), whose longest client has ``steps``; ``one``: its seconds."""
    some = max(2, int(ROUND_SECONDS / max(one, 1e-9)))
    return [0] if some >= steps else [max(1, some // 4), some]
