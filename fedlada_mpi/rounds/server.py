"""The run from the server's side: sample, train, sum, step, send, evaluate, record, checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Round
from ..rundir import checkpoint, provenance
from ..rundir.best import Best
from ..rundir.client_values import SPREAD, ClientValues
from ..rundir.metrics import ALL_PHASES, Recorder
from ..session.console import Progress
from ..session.held import Done, Left
from ..support import rng
from ..support.errors import CallbackError
from .batches import local_steps
from .costs import bytes_of
from .diagnose import Diagnosis, not_diagnosed
from .rates import local_rate
from .silo import MAX_EMPTY_ROUNDS, NUMBERS, PARTS, Silo

OnRound: TypeAlias = Callable[[dict[str, Any]], object]  # gets the round's record; False stops the run


class Server:
    def __init__(
        self,
        silo: Silo,
        sizes: np.ndarray,
        numel: int,
        recorder: Recorder,
        progress: Progress,
        segments: provenance.Segments,
        clients: ClientValues,
        best: Best | None,
        previous_known: bool = False,
        on_round: OnRound | None = None,
        lost: np.ndarray | None = None,
        left: Sequence[Left] = (),
    ):
        """``previous_known``: whether ``silo.before`` is the x before the last step, also in a run that goes on.

        Clients that are ``lost`` take no part any more, as ranks have ``left`` before the first of these rounds.
        """
        self.silo, self.world, self.config, self.algorithm = silo, silo.world, silo.config, silo.algorithm
        self.sizes, self.numel, self.recorder, self.progress = sizes, numel, recorder, progress
        self.segments, self.clients, self.best, self.previous_known = segments, clients, best, previous_known
        self.on_round = on_round
        self.lost, self.left = np.empty(0, np.int64) if lost is None else lost, left
        self.done: Done | None = None  # the last round, where the other ranks do not know of it yet
        self.empty_rounds = 0

    def run(self, start: int) -> str:
        """Rounds start+1 .. T; returns how it ended: finished or stopped."""
        config, status = self.config, "finished"
        if self.left and start:
            self.save(start)  # fewer ranks hold it now
        for t in range(start, config.rounds):
            stop, last = self.round(t), t + 1 == config.rounds
            if stop or last or (config.checkpoint_every and (t + 1) % config.checkpoint_every == 0):
                self.save(t + 1)
            if stop and not last:
                status = "stopped"
                break
        return status

    def save(self, t: int) -> None:
        """A checkpoint after round ``t``, and the files that belong to it."""
        self.clients.write()
        if self.best:
            self.best.write()
        self.recorder.sync()
        self._order({"do": "checkpoint", "round": t})
        self.silo.save(t, self._more(t))

    def _order(self, order: dict[str, Any]) -> None:
        """Tell all ranks what to do next and, where any of them may have to serve, what was done last."""
        held, done = self.silo.held, self.done
        if held:
            order, self.done = {**order, "done": done}, None
        self.world.broadcast_json(order)
        if held:
            held.take(done)

    def _more(self, t: int) -> dict[str, Tensor]:
        """What a checkpoint keeps of the run, in addition to what the ranks have."""
        segments = provenance.encode(self.segments.until(t))
        kept = self.best.kept() if self.best else {}
        previous = {checkpoint.PREVIOUS: self.silo.before} if self.config.diagnose else {}
        return {checkpoint.SEGMENTS: torch.frombuffer(bytearray(segments), dtype=torch.uint8), **kept, **previous}

    def round(self, t: int) -> bool:
        """One round; returns whether a rank was asked to stop, or ``on_round`` did."""
        config, silo = self.config, self.silo
        participants = rng.participants(config.clients, config.participation, config.sampling, config.seed, t)
        participants = participants[~np.isin(participants, self.lost)]
        r = self._round(t, participants)
        evaluated = self._due(t + 1)
        diagnosis = self._diagnosis(t)
        order = {
            "do": "round",
            "round": asdict(r),
            "participants": participants.tolist(),
            "evaluate": evaluated,
            "gradients": diagnosis.points if diagnosis else 0,
        }
        self._order(order)
        if diagnosis:
            diagnosis.begin(silo.gradient)
        moved = self.world.bytes_moved  # from here on: a diagnosis is no part of the method's communication

        totals = silo.train(r, participants)
        included = participants
        if totals.nonfinite:
            included = np.setdiff1d(participants, totals.nonfinite)
            r = self._round(t, included)
            self.world.broadcast_json(asdict(r))
        weight = float(self.sizes[included].sum()) if config.weighting == "size" else float(r.participants)
        with silo.clock("server"):
            correction = self.step(r, weight, totals.scalars)
        self.previous_known = True
        silo.receive(r)
        ranks = silo.report(totals, evaluated)
        by_client = silo.report_clients() if "clients" in evaluated else None

        sums = dict(zip(NUMBERS, ranks[:, : len(NUMBERS)].sum(0).tolist(), strict=True))
        self.empty_rounds = self.empty_rounds + 1 if totals.nonfinite and not r.participants else 0
        stops, by_server = sums["nonfinite"] and config.on_nonfinite == "stop", not math.isfinite(correction)
        if stops or by_server or self.empty_rounds == MAX_EMPTY_ROUNDS:
            self.world.broadcast_json({"do": "diverged", "round": t + 1})
            raise silo.diverged(t + 1, by_server)
        record = self._record(r, participants, sums, ranks)
        known = r.participants and "offset" in self.algorithm.up and self.algorithm.communicates(t)
        drift = sums["offset_norm2"] / weight if known else None
        if drift is not None and silo.robust:
            # The formula is that of the plain mean: the ranks have measured the distances instead of the offsets.
            record["consistency"], drift = drift, None
        else:
            # Rounding can leave it just under zero.
            record["consistency"] = None if drift is None else max(0.0, drift + correction)
        record["bytes_mpi"] = self.world.bytes_moved - moved
        if config.eval_clients:
            record |= dict.fromkeys(SPREAD) if by_client is None else self.clients.add(t + 1, *by_client)
        if config.diagnose:
            record |= diagnosis.end(silo.before, drift) if diagnosis else not_diagnosed()
        if totals.nonfinite:
            record["nonfinite"] = totals.nonfinite
        if self.left:
            record["left"], self.left = [left.rank for left in self.left], ()
        if self.best:
            self.best.add(record, silo.s.x)
        self.recorder.add(record)
        if silo.held:
            self.done = {"record": record, "clients": by_client and [table.tolist() for table in by_client]}
        self.progress.round(record)
        return sums["stop"] > 0 or self._stopped_by_caller(record)

    def _stopped_by_caller(self, record: dict[str, Any]) -> bool:
        try:
            return self.on_round is not None and self.on_round(deepcopy(record)) is False
        except (Exception, SystemExit) as error:
            raise CallbackError(f"on_round failed on rank 0: {type(error).__name__}: {error}") from error

    def _due(self, number: int) -> list[str]:
        """What the model is evaluated on after round ``number``: after the last one on everything."""
        config = self.config
        every = {"test": config.eval_every, "train": config.eval_train_every}
        if config.eval_train_every < 0:
            every["train"] = config.eval_every
        due = [part for part, n in every.items() if number == config.rounds or (n and number % n == 0)]
        if config.eval_clients and (number == config.rounds or number % config.eval_clients == 0):
            due = ["test", "train", "clients"]  # clients' values are those of these images
        return [*due, "val"] if self.best and "test" in due else due

    def _diagnosis(self, t: int) -> Diagnosis | None:
        """Of round t, if it is to have one."""
        every, silo = self.config.diagnose, self.silo
        if not every or (t + 1) % every:
            return None
        return Diagnosis(self.algorithm, t, silo.s, silo.before if self.previous_known else None)

    def _round(self, t: int, participants: np.ndarray) -> Round:
        config = self.config
        steps = float(local_steps(config, self.sizes[participants]).mean()) if len(participants) else 0.0
        return Round(t, local_rate(config, t), steps, len(participants), config.clients)

    def step(self, r: Round, weight: float, scalars: dict[str, float]) -> float:
        """The method's server step, from sums with total ``weight``; returns consistency less mean ||offset_i||^2.

        mean ||x_i - x^{t+1}||^2 = mean ||offset_i||^2 - 2 <mean offset, D> + ||D||^2,   D = x^t - x^{t+1}
        """
        silo, s, a = self.silo, self.silo.s, self.algorithm
        silo.before.copy_(s.x)
        if not r.participants or not a.communicates(r.t):
            return 0.0
        weights = {name: float(r.participants) if name in a.uniform else weight for name in (*a.up, *a.scalars)}
        if silo.kept_sums and not silo.kept_sums.divides:
            weights = dict.fromkeys(weights, 1.0)
        mean = {name: total.div_(weights[name]) for name, total in silo.sums.items()}
        mean |= {name: torch.tensor(total / weights[name], dtype=torch.float64) for name, total in scalars.items()}
        offset = mean["offset"].double() if "offset" in mean else torch.zeros_like(s.x, dtype=torch.float64)
        a.server(s, mean, r)
        moved = (silo.before - s.x).double()
        return float(torch.dot(moved, moved) - 2 * torch.dot(offset, moved))

    def _record(self, r: Round, participants: np.ndarray, sums: dict[str, float], ranks: np.ndarray) -> dict[str, Any]:
        vector = self.numel * self.silo.s.x.element_size()
        record: dict[str, Any] = {
            "round": r.t + 1,
            "lr": r.lr,
            "participants": participants.tolist(),
            "local_loss": sums["loss"] / r.participants if r.participants else None,
        }
        for part in PARTS if self.best else PARTS[:-1]:
            count = sums[f"{part}_count"]
            record[f"{part}_loss"] = sums[f"{part}_loss"] / count if count else None
            record[f"{part}_acc"] = sums[f"{part}_correct"] / count if count else None
        talk = self.algorithm.communicates(r.t)
        # Clients that are left out have received, but nothing of theirs is sent.
        received, sent = (len(participants), r.participants) if talk else (0, 0)
        record["bytes_down"], record["bytes_up"] = bytes_of(self.algorithm, vector, received, sent)
        record["paper_units"] = received * self.algorithm.paper_units
        by_phase = dict(zip(ALL_PHASES, ranks[:, len(NUMBERS) :].T, strict=True))
        by_phase["total"] = by_phase["total"][:1]
        record["seconds"] = {phase: float(values.max()) for phase, values in by_phase.items()}
        wait = ranks[:, NUMBERS.index("wait")]
        record["seconds_by_rank"] = {"train": by_phase["train"].tolist(), "wait": wait.tolist()}
        return record
