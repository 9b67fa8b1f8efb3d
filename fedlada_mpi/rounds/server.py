"""The run from the server's side: sample, train, sum, step, send, evaluate; what is recorded is the watchers' work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import Tensor

from ..algorithms import Round
from ..algorithms.hook_draws import server_draws
from ..rundir.columns import ALL_PHASES, PARTS
from ..support.processes import machine_memory
from .costs import bytes_of
from .evaluate import parts_due
from .rates import local_rate
from .silo import MAX_EMPTY_ROUNDS, Silo
from .vectors import is_finite
from .watcher import Finished, Order, Watcher

MEMORY_SHARE = 0.25  # of the machine's memory, the most that copies for a checkpoint may take


class Server:
    """The root's part of a run, in addition to its ``silo``.

    >>> Server(silo, watchers=[progress]).run(start=0)
    'finished'
    """

    def __init__(self, silo: Silo, watchers: Sequence[Watcher] = ()):
        """``watchers``: of the root alone, behind those that every rank has."""
        self.silo, self.world, self.config, self.algorithm = silo, silo.world, silo.config, silo.algorithm
        self.watchers = [*silo.watchers, *watchers]
        self.validates = "val" in silo.evaluations.examples
        self.empty_rounds = 0
        self.ranks_writing = 0.0  # how many ranks have not written their part of a checkpoint yet
        self.is_void: Callable[[int], bool] = lambda t: False  # whether a round is left out

    def run(self, start: int) -> str:
        """Rounds start+1 .. T; returns how it ended: finished or stopped."""
        config, silo = self.config, self.silo
        for t in range(start, config.rounds):
            void = self.is_void(t)
            if not void and not all(watcher.permits(t) for watcher in self.watchers):
                self.save(t)
                return "stopped"
            stop, last = self.void(t) if void else self.round(t), t + 1 == config.rounds
            if stop or last:
                self.save(t + 1)
            elif config.checkpoint_every and (t + 1) % config.checkpoint_every == 0:
                self.save(t + 1, wait=False)
            elif silo.checkpoints.draft and not self.ranks_writing:
                self.settle(t + 1)
            if stop and not last:
                return "stopped"
        return "finished"

    def save(self, t: int, wait: bool = True) -> None:
        """A checkpoint after round ``t``, and the files that belong to it. Without ``wait``, rounds go on meanwhile."""
        wait = wait or self.silo.bytes_copied > MEMORY_SHARE * machine_memory()
        more: dict[str, Tensor] = {}
        for watcher in self.watchers:
            more |= watcher.save(t)
        self.ranks_writing = 0.0 if wait else math.inf  # not known before a round
        self.order({"do": "checkpoint", "t": t, "wait": wait})
        self.silo.save(t, more, wait)

    def settle(self, t: int) -> None:
        """Complete the checkpoint that all ranks have written; where that failed, write one after round ``t``."""
        self.order({"do": "settle"})
        if not self.silo.checkpoints.settle():
            self.save(t)

    def order(self, order: Order) -> None:
        """Tell all ranks what to do next."""
        for watcher in self.watchers:
            watcher.order(order)
        self.world.broadcast_json(order)
        for watcher in self.watchers:
            watcher.ordered(order)

    def round(self, t: int) -> bool:
        """One round; returns whether the run is to stop after it."""
        silo, participants = self.silo, self.silo.sample(t)
        r, due = self.described(t, participants), parts_due(self.config, t + 1, self.validates)
        called = None if participants is None else participants.tolist()
        order = {"do": "round", "round": asdict(r), "participants": called, "evaluate": due}
        self.order(order)
        moved_before = self.world.bytes_moved  # what watchers ask for is no part of the method's communication

        left_out = silo.train(r, participants)
        r, weight = self.included(r, participants, left_out)
        with silo.clock("server"):
            finite = self.step(r, weight)
        silo.exchange(r)
        ranks = silo.report(order)

        sums = dict(zip(silo.numbers, ranks[:, : len(silo.numbers)].sum(0).tolist(), strict=True))
        self.refuse_divergence(t, finite, bool(sums["nonfinite"]), bool(sums["nonfinite"]) and not r.participants)
        self.ranks_writing = sums["writing"]
        done = Finished(r, participants, weight, sums)
        record = self.record(done, ranks) | {"bytes_mpi": self.world.bytes_moved - moved_before}
        if left_out or silo.aggregation.totals.left_out:
            record["nonfinite"] = left_out or silo.aggregation.totals.left_out
        if silo.aggregation.totals.out_of_range:
            record["out_of_range"] = silo.aggregation.totals.out_of_range
        return self.publish(done, record) or sums["stop"] > 0

    def void(self, t: int) -> bool:
        """Leave a round out; the model stays as it is. Returns whether the run is to stop after it."""
        self.order({"do": "void", "t": t})
        silo, nobody = self.silo, np.empty(0, np.int64)
        silo.evaluations.of_all = {}
        done = Finished(self.described(t, nobody), nobody, 0.0, dict.fromkeys(silo.numbers, 0.0))
        record = self.record(done, np.zeros((1, len(silo.numbers) + len(ALL_PHASES))))
        return self.publish(done, record | {"bytes_mpi": 0, "void": True})

    def included(self, r: Round, participants: np.ndarray | None, left_out: Sequence[int]) -> tuple[Round, float]:
        """The round without the participants that are left out, on all ranks, and the weight of its sums."""
        silo, totals = self.silo, self.silo.aggregation.totals
        if participants is None:
            return r, r.participants
        if silo.aggregation.conceals:
            steps = totals.steps / totals.participants if totals.participants else 0.0
            r = replace(r, participants=totals.participants, steps=steps)
            self.world.broadcast_json(asdict(r))
            return r, totals.weight
        if left_out:
            participants = np.setdiff1d(participants, left_out)
            r = self.described(r.t, participants)
            self.world.broadcast_json(asdict(r))
        return r, silo.weight(participants) if self.config.weighting == "size" else r.participants

    def described(self, t: int, participants: np.ndarray | None) -> Round:
        config = self.config
        if participants is None:  # nothing that depends on them
            expected = config.participation * self.silo.clients_left
            return Round(t, local_rate(config, t), float(config.local_steps), expected, config.clients)
        steps = self.silo.mean_steps(participants) if len(participants) else 0.0
        return Round(t, local_rate(config, t), steps, len(participants), config.clients)

    def step(self, r: Round, weight: float) -> bool:
        """The method's server step, from sums with total ``weight``; returns whether x is finite."""
        silo, s = self.silo, self.silo.s
        silo.x_previous.copy_(s.x)
        if not r.participants or not self.algorithm.communicates(r.t):
            return True
        means = silo.aggregation.means(weight, r.participants)
        for watcher in self.watchers:
            watcher.before_step(means)
        with server_draws(self.algorithm, "server", r.t, silo.trainer.buffers.real):
            self.algorithm.server(s, means, r)
        return is_finite(s.x)

    def refuse_divergence(self, t: int, finite: bool, any_nonfinite: bool, is_empty: bool) -> None:
        """End the run where it has left the finite numbers, or has had no finite client for many rounds."""
        self.empty_rounds = self.empty_rounds + 1 if is_empty else 0
        stops = any_nonfinite and self.config.on_nonfinite == "stop"
        if stops or not finite or self.empty_rounds == MAX_EMPTY_ROUNDS:
            self.world.broadcast_json({"do": "diverged", "t": t + 1})
            raise self.silo.diverged(t + 1, by_server=not finite)

    def publish(self, done: Finished, record: dict[str, Any]) -> bool:
        """Complete the record of a round; returns whether a watcher stops the run."""
        for watcher in self.watchers:
            record |= watcher.columns(done)
        record = self.silo.evaluations.columns.ordered(record)
        answers = [watcher.recorded(record) for watcher in self.watchers]
        return False in answers

    def record(self, done: Finished, ranks: np.ndarray) -> dict[str, Any]:
        """Of a round itself; ``ranks``: every rank's numbers and phase times."""
        r, silo = done.r, self.silo
        vector = silo.trainer.engine.network.layout.numel * silo.s.x.element_size()
        record: dict[str, Any] = {
            "round": r.t + 1,
            "lr": r.lr,
            "participants": None if done.participants is None else done.participants.tolist(),
            "local_loss": done.sums["loss"] / r.participants if r.participants and silo.aggregation.discloses else None,
        }
        for part in PARTS if self.validates else PARTS[:-1]:
            record |= silo.evaluations.recorded(part, done.sums)
        # Clients that are left out have received, but nothing of theirs is sent.
        received = sent = round(r.participants)
        if done.participants is not None:
            received = len(done.participants)
        if not self.algorithm.communicates(r.t):
            received = sent = 0
        record["bytes_down"], record["bytes_up"] = bytes_of(self.algorithm, vector, received, sent)
        record["paper_units"] = received * self.algorithm.paper_units
        by_phase = dict(zip(ALL_PHASES, ranks[:, len(silo.numbers) :].T, strict=True))
        by_phase["total"] = by_phase["total"][:1]
        record["seconds"] = {phase: float(values.max()) for phase, values in by_phase.items()}
        wait = ranks[:, silo.numbers.index("wait")]
        by_rank = {"train": by_phase["train"].tolist(), "wait": wait.tolist()}
        if done.participants is None:  # how long a rank trains tells how many it has
            by_rank = {name: [] for name in by_rank}
        record["seconds_by_rank"] = by_rank
        return record
