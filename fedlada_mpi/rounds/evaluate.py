"""The task's metrics of one model: on images that are on the device, and on all parts of the data that a rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..gpu.graphs import Capture
from ..mpi import World
from ..rundir.columns import METRICS, PARTS
from ..settings import Config
from .batches import LocalData, Normaliser
from .gradients import Engine

# Large enough to fill a GPU; small enough that a CPU's caches still help.
BATCH = {"cuda": 5000, "cpu": 250}
MIN_BATCH = 100  # images: on a full GPU, a batch of fewer is not halved again


@dataclass
class Evaluator:
    """How models are evaluated: engine, precision, and a capture where there is a GPU."""

    engine: Engine
    normalise: Normaliser
    dtype: torch.dtype
    capture: Capture | None

    def of(
        self, x: Tensor, images: Tensor, labels: Tensor, each: bool = False, starts: Sequence[int] = (0,)
    ) -> Evaluation:
        """The evaluation of the model that ``x`` holds when it is called; with ``each``, also of single images.

        No batch reaches across ``starts``, so that its shape depends on the images from one start to the next only.
        """
        return Evaluation(self, x, images, labels, each, starts)


class Evaluation:
    """Loss and accuracy of the model ``x`` on ``images``; on a GPU captured once and replayed."""

    def __init__(
        self,
        evaluator: Evaluator,
        x: Tensor,
        images: Tensor,
        labels: Tensor,
        each: bool = False,
        starts: Sequence[int] = (0,),
    ):
        self.bounds = [*starts, len(images)]
        self.evaluator, self.x, self.images, self.labels = evaluator, x, images, labels
        self.totals = torch.zeros(2, dtype=torch.float64, device=images.device)
        # Loss of every image, and whether it is correct.
        self.each = torch.zeros(2, len(images), dtype=torch.float64, device=images.device) if each else None
        self.batch = BATCH[images.device.type]
        self.run = self._captured(evaluator.capture) if evaluator.capture else self._run

    def _captured(self, capture: Capture) -> Callable[[], None]:
        """With batches that fit next to what is already on the GPU."""
        while True:
            try:
                return capture(self._run).replay
            except torch.cuda.OutOfMemoryError:
                if self.batch < MIN_BATCH:
                    raise
                self.batch //= 2

    def __call__(self) -> list[float]:
        """[sum of losses, number correct, number of images]."""
        self.run()
        return [*self.totals.tolist(), len(self.images)]

    def by_group(self, groups: np.ndarray, least: int = 0) -> np.ndarray:
        """As the last call gave them, by group of images: sums of losses, numbers correct, numbers of images.

        ``groups``: the number of every image's group; there are ``least`` groups or more.
        """
        if self.each is None:
            raise ValueError("single images were not asked for")
        # Added up on the host in the order of the images: atomic additions on a GPU would differ from run to run.
        weights = (*self.each.cpu().numpy(), None)
        return np.stack([np.bincount(groups, each, minlength=least) for each in weights])

    @torch.no_grad()
    def _run(self) -> None:
        engine, normalise, dtype = self.evaluator.engine, self.evaluator.normalise, self.evaluator.dtype
        self.totals.zero_()
        for part in self._batches():
            images, labels = self.images[part], self.labels[part]
            logits = engine.logits(self.x, normalise(images, dtype))
            wide = logits if logits.dtype == torch.float64 else logits.float()
            self.totals[0] += F.cross_entropy(wide, labels, reduction="sum")
            correct = wide.argmax(1) == labels
            self.totals[1] += correct.sum()
            if self.each is not None:
                self.each[0, part] = F.cross_entropy(wide, labels, reduction="none")
                self.each[1, part] = correct

    def _batches(self) -> Iterator[slice]:
        for first, last in pairwise(self.bounds):
            yield from (slice(at, min(at + self.batch, last)) for at in range(first, last, self.batch))


def parts_due(config: Config, number: int, validation: bool) -> list[str]:
    """What the model is evaluated on after round ``number``: after the last one on everything."""
    every = {"test": config.eval_every, "train": config.eval_train_every}
    if config.eval_train_every < 0:
        every["train"] = config.eval_every
    due = [part for part, n in every.items() if number == config.rounds or (n and number % n == 0)]
    if clients_due(config, number):
        due = ["test", "train"]  # clients' values are those of these images
    return [*due, "val"] if validation and "test" in due else due


def clients_due(config: Config, number: int) -> bool:
    """Whether the clients are evaluated one by one after round ``number``."""
    return bool(config.eval_clients) and (number == config.rounds or number % config.eval_clients == 0)


SUMS = (*(metric.name for metric in METRICS), "count")  # over images, of each part


class Evaluations:
    """The model ``x`` on what a rank has of each part of the data: its clients' images, and on the root the held-out.

    Evaluations are made when they are first asked for: on a GPU that takes time and memory.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        evaluator: Evaluator,
        x: Tensor,
        data: LocalData,
        held_out: Mapping[str, tuple[Tensor, Tensor]],
    ):
        self.world, self.config, self.evaluator, self.x, self.data = world, config, evaluator, x, data
        # By part of the data, images and labels; the root has those that belong to no client.
        self.images = {**({"train": (data.images, data.labels)} if len(data.sizes) else {}), **held_out}
        self.made: dict[str, Evaluation] = {}
        # With exact sums, clients' images are added up client by client, so that their order is the same on any ranks.
        self.by_client = config.sums == "exact"

    @property
    def nbytes(self) -> int:
        """Of what belongs to no client."""
        return sum(tensor.nbytes for part in self.images if part != "train" for tensor in self.images[part])

    def __call__(self, due: Sequence[str]) -> list[list[float]]:
        """For each of PARTS the SUMS, zero where it is not due or this rank has nothing of it; collective."""
        sums = [self._evaluate(part) if part in due else [0.0] * len(SUMS) for part in PARTS]
        if self.by_client and "train" in due:
            total = self._train_by_client().sum(1)
            sums[0] = (total if self.world.rank == 0 else np.zeros_like(total)).tolist()
        return sums

    def _evaluate(self, part: str) -> list[float]:
        if part not in self.images:
            return [0.0] * len(SUMS)
        if part not in self.made:
            each, starts = self.config.eval_clients > 0, [0]
            if self.by_client and part == "train":
                each, starts = True, self.data.starts.tolist()
            self.made[part] = self.evaluator.of(self.x, *self.images[part], each, starts)
        return self.made[part]()

    def by_client_and_class(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the last evaluation, on the root: SUMS by client, and by class of the test images; collective."""
        by_class = np.zeros((len(SUMS), 0))
        if "test" in self.images:
            labels = self.images["test"][1].cpu().numpy()
            by_class = self.made["test"].by_group(labels)
        return self._train_by_client(), by_class

    def _train_by_client(self) -> np.ndarray:
        data, by_client = self.data, np.zeros((len(SUMS), self.config.clients))
        if "train" in self.images:
            groups = np.repeat(np.arange(len(data.sizes)), data.sizes)
            by_client[:, data.client_ids] = self.made["train"].by_group(groups, len(data.sizes))
        return self.world.reduce_sum(by_client)
