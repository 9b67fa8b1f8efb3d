"""Loss and accuracy of one model on a set of images that are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..gpu.graphs import Capture
from .batches import Normaliser
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
