"""A round from the silo's side. The root takes the same steps; it has clients only if it trains too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Algorithm, Round, Vectors
from ..mpi import World
from ..mpi.transport import Transport
from ..rundir import checkpoint
from ..rundir.metrics import Clock
from ..session.held import Held
from ..settings import Config
from ..support.errors import DivergedError, UserError
from ..support.signals import stop_requested
from .aggregate import KeptSums
from .costs import RankMemory
from .device import synchronize
from .diagnose import Objective
from .evaluate import Evaluation, Evaluator
from .trainer import Totals, Trainer

PARTS = ("train", "test", "val")  # of the data, that models are evaluated on
# What every rank reports after a round, before its phase times.
NUMBERS = (
    *("loss", "offset_norm2"),
    *(f"{part}_{name}" for part in PARTS for name in ("loss", "correct", "count")),
    *("stop", "wait", "nonfinite"),
)


MAX_EMPTY_ROUNDS = 10  # in a row without a finite client, after which --on-nonfinite skip ends the run


def named_rows(names: Sequence[str], size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Zero vectors that are adjacent in memory, so that several can travel in one call."""
    return dict(zip(names, torch.zeros(len(names), size, dtype=dtype, device=device), strict=True))


class Silo:
    def __init__(
        self,
        world: World,
        config: Config,
        algorithm: Algorithm,
        trainer: Trainer,
        transport: Transport,
        s: Vectors,
        evaluator: Evaluator,
        held_out: Mapping[str, tuple[Tensor, Tensor]],
        digests: dict[str, str],
        objective: Objective,
    ):
        self.world, self.config, self.algorithm = world, config, algorithm
        self.trainer, self.transport = trainer, transport
        self.s, self.evaluator, self.digests, self.objective = s, evaluator, digests, objective
        self.sums = named_rows(algorithm.up, len(s.x), s.x.dtype, s.x.device)
        self.exact, self.robust = config.sums == "exact", config.robust != "none"
        keeps = self.exact or self.robust
        self.kept_sums = KeptSums(world, config, algorithm, transport, self.sums) if keeps else None
        self.before = torch.zeros_like(s.x)
        data = trainer.data
        # By part of the data, images and labels; the root has those that belong to no client.
        self.images = {**({"train": (data.images, data.labels)} if len(data.sizes) else {}), **held_out}
        self.evaluations: dict[str, Evaluation] = {}  # made when first asked for: on a GPU that takes time and memory
        self.nonfinite: list[int] = []  # of this rank, in the last round
        self.clock = Clock()
        self.held: Held | None = None  # where the run goes on when ranks are lost
        # The server's vectors that the root sends after a step. Others are its own, unless any rank may have to serve.
        self.sent = (*algorithm.down, *(algorithm.private if world.tolerant else ()))

    @property
    def order_of_sums(self) -> dict[str, Any]:
        """What the order of the sums over ranks depends on, and with it their last bits."""
        by_file = self.config.silo_per_rank and self.world.size > 1
        ranks = {"ranks": self.world.size, "transport": self.transport.kind, "silo_per_rank": by_file}
        ranks |= {"nodes": self.transport.nodes}
        return {} if self.exact else ranks

    @property
    def memory(self) -> RankMemory:
        """What this rank needs of its device."""
        held_out = chain(*(self.images[part] for part in self.images if part != "train"))
        vectors = [*vars(self.s).values(), *self.sums.values(), self.before, *held_out]
        if self.world.tolerant:
            vectors += [*vars(self.s).values(), self.before]  # of ``held``
        kept = 0
        if self.kept_sums:
            vectors.append(self.kept_sums.integers)
            kept = self.kept_sums.kept.bytes_per_client
        if "val" in self.images:
            vectors.append(self.s.x)  # the best model so far
        memory = self.trainer.memory
        resident = memory.resident + sum(vector.nbytes for vector in vectors)
        if self.config.diagnose:
            resident += self.objective.nbytes
        return RankMemory(memory.per_client, resident, memory.clients_that_fit, kept)

    def train(self, r: Round, participants: np.ndarray) -> Totals:
        """Local training of this rank's participants, then the sums to the root."""
        # Ends with the slowest rank; timed as waiting, not as communication.
        totals = self.world.collectively(lambda: self._local(r, participants))
        # Of all ranks from here on; where they are not skipped, the root learns of them by the numbers of ``report``.
        self.nonfinite = totals.nonfinite
        totals.nonfinite = self._all_nonfinite() if self.config.on_nonfinite == "skip" else []
        if self.kept_sums:
            self._reduce_kept(self.kept_sums, r, participants, totals)
        elif self.algorithm.communicates(r.t):
            with self.clock("reduce"):
                self.transport.reduce(list(self.sums.values()))
                if totals.scalars:
                    by_rank = self.world.gather(list(totals.scalars.values()))
                    totals.scalars = dict(zip(totals.scalars, by_rank.sum(0).tolist(), strict=True))
        return totals

    def _reduce_kept(self, sums: KeptSums, r: Round, participants: np.ndarray, totals: Totals) -> None:
        """As above, from the contributions one by one; the root has the totals of all ranks, the others none."""
        with self.clock("reduce"):
            sums.share(participants)
            root = self.world.rank == 0
            totals.loss, totals.offset_norm2 = (sums.loss, sums.offset_norm2) if root else (0.0, 0.0)
            if self.algorithm.communicates(r.t) and sums.included.any():
                sums.reduce()
                totals.scalars = sums.scalars()

    def _all_nonfinite(self) -> list[int]:
        """The clients of all ranks whose result in this round was not finite."""
        if self.world.all_ranks(not self.nonfinite):
            return []
        return sorted(client for clients in self.world.allgather_json(self.nonfinite) for client in clients)

    def _local(self, r: Round, participants: np.ndarray) -> Totals:
        with self.clock("train"):
            for total in self.sums.values():
                total.zero_()
            kept = self.kept_sums.kept if self.kept_sums else None
            totals = self.trainer.round(self.s, r, participants, self.sums, kept)
            synchronize(self.trainer.device)
        return totals

    def receive(self, r: Round) -> None:
        """The server's new vectors, and those derived from them."""
        self.world.barrier()
        with self.clock("bcast"):
            if self.world.rank != 0:
                self.before.copy_(self.s.x)
            if not self.algorithm.communicates(r.t):
                return
            if self.transport.rounds:
                self.transport.bcast_change(self.s.x, self.before)
                self.share(tuple(name for name in self.sent if name != "x"))
            else:
                self.share(self.sent)
            if r.participants:
                self.algorithm.derive(self.s, self.before, r)
            synchronize(self.trainer.device)

    def share(self, names: tuple[str, ...]) -> None:
        # Bits are bits: the transport may be planned for the integers of the sums.
        if names:
            self.transport.bcast([getattr(self.s, name).view(self.transport.dtype) for name in names])

    def report(self, totals: Totals, evaluated: Sequence[str]) -> np.ndarray:
        """Evaluate what is asked for (of PARTS), and send this rank's numbers and times to the root."""
        if self.kept_sums and self.robust and "offset" in self.algorithm.up:
            totals.offset_norm2 = self.kept_sums.spread(self.before - self.s.x)
        with self.clock("eval"):
            sums = [self._evaluate(part) if part in evaluated else [0.0, 0.0, 0.0] for part in PARTS]
            if self.exact and "train" in evaluated:
                by_client = self._train_by_client()
                sums[0] = by_client.sum(1).tolist() if self.world.rank == 0 else [0.0, 0.0, 0.0]
        wait, self.world.seconds_waiting = self.world.seconds_waiting, 0.0
        stop, nonfinite = float(stop_requested()), float(len(self.nonfinite))
        numbers = [totals.loss, totals.offset_norm2, *chain(*sums), stop, wait, nonfinite]
        return self.world.gather(numbers + self.clock.take())

    def _evaluate(self, part: str) -> list[float]:
        """Sum of losses, number correct and number of images, of those that this rank has."""
        if part not in self.images:
            return [0.0, 0.0, 0.0]
        if part not in self.evaluations:
            each, starts = self.config.eval_clients > 0, [0]
            if self.exact and part == "train":
                each, starts = True, self.trainer.data.starts.tolist()
            self.evaluations[part] = self.evaluator.of(self.s.x, *self.images[part], each, starts)
        return self.evaluations[part]()

    def report_clients(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the last evaluation, on the root: sums by client and by class of the test images (Evaluation.by_group)."""
        by_class = np.zeros((3, 0))
        if "test" in self.images:
            labels = self.images["test"][1].cpu().numpy()
            by_class = self.evaluations["test"].by_group(labels)
        return self._train_by_client(), by_class

    def _train_by_client(self) -> np.ndarray:
        """Of the last evaluation on the training images, on the root: sums by client."""
        data, by_client = self.trainer.data, np.zeros((3, self.config.clients))
        if "train" in self.images:
            groups = np.repeat(np.arange(len(data.sizes)), data.sizes)
            by_client[:, data.client_ids] = self.evaluations["train"].by_group(groups, len(data.sizes))
        return self.world.reduce_sum(by_client)

    def gradient(self, x: Tensor | None = None) -> Tensor:
        """Of the global objective at the root's ``x``, added up on the root (elsewhere: this rank's part)."""
        objective = self.objective
        if x is not None:
            objective.x.copy_(x)
        self.world.barrier()
        with self.clock("eval"):
            self.transport.bcast([objective.x.view(self.transport.dtype)])
            objective.compute()
            synchronize(self.trainer.device)
        self.world.barrier()
        with self.clock("eval"):
            if self.exact:  # the transport is planned for integers
                objective.gradient.copy_(torch.from_numpy(self.world.reduce_sum(objective.gradient.cpu().numpy())))
            else:
                self.transport.reduce([objective.gradient])
        return objective.gradient

    def save(self, t: int, more: Mapping[str, Tensor] | None = None) -> None:
        """A checkpoint after round ``t``; ``more`` is what the root adds."""
        state = self.trainer.client_state.vectors
        about = (self.config, self.s, state, self.digests, self.order_of_sums, more)
        checkpoint.save(self.world, Path(self.config.out), t, *about)

    def diverged(self, number: int, by_server: bool = False) -> DivergedError:
        """The end of a run that left the finite numbers in round ``number``; all ranks get the root's message."""
        clients = self._all_nonfinite()
        message = ""
        if self.world.rank == 0:
            message = f"round {number}: " + _explain([] if by_server else clients, self.config.on_nonfinite)
            saved = checkpoint.complete(Path(self.config.out))
            message += f"; the last checkpoint is {saved[-1]}" if saved else "; there is no checkpoint yet"
        return DivergedError(self.world.broadcast_json({"message": message})["message"])

    def serve(self) -> str:
        """The whole run on ranks other than the root: follow the server's orders."""
        while True:
            order = self.world.broadcast_json()
            if self.held:
                self.held.take(order.get("done"))
            if order["do"] == "end":
                return str(order["status"])
            if order["do"] == "checkpoint":
                self.save(order["round"])
                continue
            if order["do"] == "fail":
                raise UserError(order["message"])
            if order["do"] == "diverged":
                raise self.diverged(order["round"])
            for _ in range(order["gradients"]):
                self.gradient()
            r = Round(**order["round"])
            totals = self.train(r, np.asarray(order["participants"], np.int64))
            if totals.nonfinite:
                r = Round(**self.world.broadcast_json())
            self.receive(r)
            self.report(totals, order["evaluate"])
            if "clients" in order["evaluate"]:
                self.report_clients()


def _explain(clients: list[int], on_nonfinite: str) -> str:
    """What was not finite, and what to do."""
    if not clients:
        return "the server's step gave parameters that are not finite: lower --server-lr or --lr"
    names = ", ".join(map(str, clients[:10])) + (f" and {len(clients) - 10} more" if len(clients) > 10 else "")
    which = f"the result of client{'s' * (len(clients) > 1)} {names} is not finite"
    if on_nonfinite == "skip":
        return f"{which}, and no client's was for {MAX_EMPTY_ROUNDS} rounds: lower --lr, or set --clip"
    return f"{which}: lower --lr, set --clip, or leave such clients out with --on-nonfinite skip"
