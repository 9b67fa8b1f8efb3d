"""Loss and accuracy of one model on a set of images that lie on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .batches import Normaliser
from .gradients import Generic, Stacked
from .graphs import Capture

# Large enough to fill a GPU; small enough that a CPU's caches still help.
BATCH = {"cuda": 5000, "cpu": 250}
LEAST = 100  # images: on a full GPU, a batch of fewer is not halved again


class Evaluation:
    """How the model ``x`` does on ``images``; on a GPU captured once and replayed."""

    def __init__(
        self,
        gradient: Stacked | Generic,
        x: Tensor,
        images: Tensor,
        labels: Tensor,
        normalise: Normaliser,
        dtype: torch.dtype,
        capture: Capture | None,
    ):
        self.gradient, self.x, self.images, self.labels = gradient, x, images, labels
        self.normalise, self.dtype = normalise, dtype
        self.totals = torch.zeros(2, dtype=torch.float64, device=images.device)
        self.batch = BATCH[images.device.type]
        self.run = self._captured(capture) if capture else self._run

    def _captured(self, capture: Capture) -> Callable[[], None]:
        """With batches that fit beside what is already on the GPU."""
        while True:
            try:
                return capture(self._run).replay
            except torch.cuda.OutOfMemoryError:
                if self.batch < LEAST:
                    raise
                self.batch //= 2

    def __call__(self) -> list[float]:
        """[sum of losses, number correct, number of images]."""
        self.run()
        return [*self.totals.tolist(), len(self.images)]

    @torch.no_grad()
    def _run(self) -> None:
        self.totals.zero_()
        for start in range(0, len(self.images), self.batch):
            images, labels = self.images[start : start + self.batch], self.labels[start : start + self.batch]
            logits = self.gradient.logits(self.x, self.normalise(images, self.dtype))
            wide = logits if logits.dtype == torch.float64 else logits.float()
            self.totals[0] += F.cross_entropy(wide, labels, reduction="sum")
            self.totals[1] += (wide.argmax(1) == labels).sum()
