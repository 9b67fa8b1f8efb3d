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
        self.evaluate: list[str] = []
        self.seconds: dict[str, float] = {}
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

    def round(self, t: int, steps: int = 0, evaluate: Sequence[str] = ()) -> dict[str, float]:
        """The seconds of a round by phase, of the slowest rank; ``steps``: of every client, 0: of its own."""
        self.server.order({"do": "void", "t": t, "steps": steps})
        self.evaluate = list(evaluate)
        self.silo.clock.lap()
        if self.server.round(t):
            raise UserError("--estimate was stopped")
        return self.seconds

    def order(self, order: Order) -> None:
        if order["do"] == "round":
            order["evaluate"] = self.evaluate

    def ordered(self, order: Order) -> None:
        if order["do"] != "void":
            return
        trainer = self.silo.trainer
        trainer.config = replace(self.config, local_steps=order["steps"]) if order["steps"] else self.config
        trainer.ahead = (-1, [], None)
        if trainer.plans_ahead:  # as the round before would have done
            trainer.plan_ahead(order["t"])
        self.world.barrier()

    def recorded(self, record: dict[str, Any]) -> None:
        self.seconds = record["seconds"]


def _nothing(session: Session) -> History:
    """Of a run before its first round."""
    values = ClientValues(Path(session.config.out), 0, session.clients)
    return History([], Segments([], 0, "", {}), values, None)


def measure(probe: Probe, here: PlannedRounds, counted: Counter[Due], batches: np.ndarray) -> Measured:
    """On the root: rounds with most, with median and with least work, and what is evaluated after rounds."""

    began = time.perf_counter()
    chosen = samples(here.works()) or [0]
    largest = chosen[0]
    cold = probe.round(largest, steps=1)["total"]
    one = probe.round(largest, steps=1)["total"]
    cuts = _cuts(one, int(max(here.steps[here.participants(largest)], default=1)))
    points = [(t, cut) for t in chosen for cut in cuts]
    capture = 0.0
    warm = {(t, cut): probe.round(t, steps=cut)["total"] for t, cut in points}
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
    for t in chosen[1:]:  # for which a GPU captures graphs of their own
        capture = max(capture, warm[t, cuts[0]] - median(timed[t, cuts[0]]))
    evaluations, late = {}, 0.0
    for due in counted:
        expected = float(batches[:, [PARTS.index(part) for part in due]].sum(1).max())
        if expected > EVALUATION_SECONDS:
            evaluations[due] = [expected]
            continue
        first = probe.round(largest, steps=1, evaluate=due)["eval"]
        evaluations[due] = [probe.round(largest, steps=1, evaluate=due)["eval"] for _ in range(3)]
        late += max(0.0, first - median(evaluations[due]))
    rounds = [(here.work(t, cut), seconds) for (t, cut), seconds in timed.items()]
    return Measured(0.0, rounds, phases, max(0.0, cold - one), capture, evaluations, late, 0.0)


def _cuts(one: float, steps: int) -> list[int]:
    """To how many steps rounds are cut (0: they are not), whose longest client has ``steps``; ``one``: its seconds."""
    some = max(2, int(ROUND_SECONDS / max(one, 1e-9)))
    return [0] if some >= steps else [max(1, some // 4), some]
