"""A round from the silo's side. Rank 0 takes the same steps; it has clients of its own only where it trains too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import checkpoint
from .algorithms import Algorithm, Round, Vectors
from .config import Config
from .evaluate import Evaluation
from .metrics import Clock
from .mpi import World
from .mpi_transport import Transport
from .signals import stop_requested
from .trainer import Totals, Trainer

# What every rank reports after a round, beside its phase times.
NUMBERS = ("loss", "offset_norm2", "train_loss", "train_correct", "train_count")
NUMBERS += ("test_loss", "test_correct", "test_count", "stop", "wait")


def named_rows(names: Sequence[str], size: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Zero vectors that lie one after another, so that several can travel together."""
    return dict(zip(names, torch.zeros(len(names), size, dtype=dtype, device=device)))


class Silo:
    def __init__(
        self,
        world: World,
        config: Config,
        algorithm: Algorithm,
        trainer: Trainer,
        transport: Transport,
        s: Vectors,
        test=None,
    ):
        self.world, self.config, self.algorithm, self.trainer, self.transport = (
            world,
            config,
            algorithm,
            trainer,
            transport,
        )
        self.s, self.test = s, test
        self.sums = named_rows(algorithm.up, len(s.x), s.x.dtype, s.x.device)
        self.before = torch.zeros_like(s.x)
        self.clock = Clock()

    def train(self, r: Round, participants: np.ndarray) -> Totals:
        """Local training of this rank's participants, then the sums to rank 0."""
        # Ends with the slowest rank; timed as waiting, not as communication.
        totals = self.world.together(lambda: self._local(r, participants))
        with self.clock("reduce"):
            self.transport.reduce(list(self.sums.values()))
        return totals

    def _local(self, r: Round, participants: np.ndarray) -> Totals:
        with self.clock("train"):
            for total in self.sums.values():
                total.zero_()
            totals = self.trainer.round(self.s, r, participants, self.sums)
            self.synchronise()
        return totals

    def receive(self, r: Round) -> None:
        """The server's new vectors, and those that follow from them."""
        self.world.wait()
        with self.clock("bcast"):
            if self.world.rank != 0:
                self.before.copy_(self.s.x)
            self.share(self.algorithm.down)
            if r.participants:
                self.algorithm.derive(self.s, self.before, r)
            self.synchronise()

    def share(self, names: tuple[str, ...]) -> None:
        self.transport.bcast([getattr(self.s, name) for name in names])

    def report(self, totals: Totals, evaluated: bool) -> np.ndarray:
        """Evaluate where asked, and give rank 0 this rank's numbers and times."""
        with self.clock("eval"):
            train, test = (e() if e else [0.0, 0.0, 0.0] for e in (self.evaluations if evaluated else (None, None)))
        wait, self.world.seconds_waiting = self.world.seconds_waiting, 0.0
        numbers = [totals.loss, totals.offset_norm2, *train, *test, float(stop_requested()), wait]
        return self.world.collect(numbers + self.clock.take())

    @cached_property
    def evaluations(self) -> tuple[Evaluation | None, Evaluation | None]:
        """Of this rank's training images, and of the test images where they are."""
        data, of = self.trainer.data, partial(self.trainer.evaluation, self.s.x)
        return of(data.images, data.labels) if len(data.sizes) else None, of(*self.test) if self.test else None

    def synchronise(self) -> None:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)

    def save(self, t: int) -> None:
        checkpoint.save(self.world, Path(self.config.out), t, self.config, self.s, self.trainer.kept)

    def serve(self) -> str:
        """The whole run on ranks other than 0: do as the server says."""
        while True:
            order = self.world.tell()
            if order["do"] == "end":
                return order["status"]
            if order["do"] == "checkpoint":
                self.save(order["round"])
                continue
            r = Round(**order["round"])
            totals = self.train(r, np.asarray(order["participants"], np.int64))
            self.receive(r)
            self.report(totals, order["evaluate"])
