"""What the paper's theory speaks of, measured in a run (``--diagnose N``).

F(x) = mean over all m clients of F_i(x) (``--weighting size``: weighted by n_i), where F_i is the mean loss on client
i's training images: without augmentation, clip and decay, and with Dropout off; once ranks are lost with their clients,
over those that are left. D^t = x^t - x^{t+1} is the global step.

drift              mean over S^t of ||x_{i,K} - x^t||^2
drift_ratio        drift / ||D^t||^2
direction_cosine   cos(g_a^t, grad F(x^t));   a method without g_a: cos(D^{t-1}, grad F(x^t))
gradient_norm      ||grad F(x^t)||
gradient_norm_z    ||grad F(z^t)||,   z^t = x^t / alpha - (1 - alpha) / alpha * x^{t-1},   z^0 = x^0
                   a method without g_a: z^t = x^t
step_cosine        cos(D^t, D^{t-1})
step_change        ||D^t - D^{t-1}||^2 / ||D^t||^2

A number is None where it is not defined: a cosine with the zero vector, or what needs a step that there was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...algorithms import Algorithm, Vectors
from ...models.form import each
from ...rundir import checkpoint
from ...rundir.columns import DIAGNOSED
from ...rundir.history import History
from ...settings import Config
from ...support import rng
from ..batches import LocalData
from ..device import synchronize
from ..evaluate import fitting
from ..gradients import Engine
from ..silo import Silo
from ..watcher import Finished, Order, Watcher
from . import consistency

# Images of a gradient, forward and backward; on a GPU what ten of the paper's clients take in a step.
BATCH = {"cuda": 500, "cpu": 250}


class Objective:
    """The gradient of F, of which a rank computes its clients' part; its buffers are made when first used."""

    def __init__(self, config: Config, engine: Engine, data: LocalData, sizes: np.ndarray, like: Tensor):
        """``sizes``: of all clients that are left, on all ranks; vectors have the shape and type of ``like``."""
        self.config, self.engine, self.data, self.sizes, self.like = config, engine, data, sizes, like
        self.batch = BATCH[like.device.type]

    @cached_property
    def x(self) -> Tensor:
        """Where the gradient is taken."""
        return torch.zeros_like(self.like)

    @cached_property
    def gradient(self) -> Tensor:
        return torch.zeros_like(self.like)

    @cached_property
    def _of_batch(self) -> Tensor:
        return torch.zeros_like(self.like)

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return 3 * self.like.nbytes

    @cached_property
    def _images(self) -> tuple[np.ndarray, Tensor]:
        """The index of every image that counts, and its weight."""
        config, data = self.config, self.data
        total = int(self.sizes.sum())
        share = min(1.0, config.diagnose_images / total) if config.diagnose_images else 1.0
        index, weights = [np.empty(0, np.int64)], [np.empty(0)]
        for client, start, n in zip(data.numbers.tolist(), data.starts.tolist(), data.sizes.tolist(), strict=True):
            chosen = rng.chosen(n, share, config.seed, client)
            index.append(start + chosen)
            mine = n / total if config.weighting == "size" else 1 / len(self.sizes)
            weights.append(np.full(len(chosen), mine / len(chosen)))
        return np.concatenate(index), torch.from_numpy(np.concatenate(weights)).to(self.like)

    def compute(self) -> None:
        """This rank's part of the gradient at ``x``."""
        fitting(self, self._compute)

    @torch.no_grad()
    def _compute(self) -> None:
        (index, weights), data = self._images, self.data
        self.gradient.zero_()
        for start in range(0, len(index), self.batch):
            part = slice(start, start + self.batch)
            taken, targets = data.examples.take(index[part])
            inputs = each(taken, lambda values: data.normalise(values, self.like.dtype)[None])
            batch = inputs, targets[None], weights[part][None]
            self.engine.gradients(self.x[None], self._of_batch[None], *batch, keys=None)
            self.gradient.add_(self._of_batch)


class Diagnosis(Watcher):
    def __init__(self, silo: Silo):
        self.silo = silo
        self.objective = Objective(silo.config, silo.trainer.engine, silo.trainer.data, silo.owned_sizes, silo.s.x)
        self.nbytes = self.objective.nbytes
        self.round: RoundNumbers | None = None  # the root's, of a round that is diagnosed

    def order(self, order: Order) -> None:
        self.round = None
        if order["do"] != "round" or (order["round"]["t"] + 1) % self.silo.config.diagnose:
            return
        silo = self.silo
        previous = silo.x_previous if silo.previous_known else None
        self.round = RoundNumbers(silo.algorithm, order["round"]["t"], silo.s, previous)
        order["gradients"] = self.round.points

    def ordered(self, order: Order) -> None:
        if self.round is not None:
            self.round.begin(self._gradient)
        else:
            for _ in range(order.get("gradients", 0)):
                self._gradient()

    def _gradient(self, x: Tensor | None = None) -> Tensor:
        """Of the global objective at the root's ``x``, added up on the root (elsewhere: this rank's part)."""
        objective, world, transport, clock = self.objective, self.silo.world, self.silo.transport, self.silo.clock
        if x is not None:
            objective.x.copy_(x)
        world.barrier()
        with clock("eval"):
            transport.bcast([objective.x.view(transport.dtype)])
            objective.compute()
            synchronize(objective.x.device)
        world.barrier()
        with clock("eval"):
            if transport.dtype == objective.gradient.dtype:
                transport.reduce([objective.gradient])
            else:  # it is planned for the integers of exact sums
                total = world.reduce_sum(objective.gradient.cpu().numpy())
                objective.gradient.copy_(torch.from_numpy(total))
        return objective.gradient

    def columns(self, done: Finished) -> Mapping[str, Any]:
        if self.round is None:
            return dict.fromkeys(DIAGNOSED)
        return self.round.end(self.silo.x_previous, consistency.drift(self.silo, done))

    def save(self, t: int) -> Mapping[str, Tensor]:
        return {checkpoint.PREVIOUS: self.silo.x_previous}


def create(silo: Silo, history: History | None) -> Watcher | None:
    return Diagnosis(silo) if silo.config.diagnose else None


class RoundNumbers:
    """The numbers of one round, on the root."""

    def __init__(self, algorithm: Algorithm, t: int, s: Vectors, previous: Tensor | None):
        """Before the round; ``previous`` is x^{t-1}, None where it is not known."""
        self.s = s
        self.numbers: dict[str, float | None] = dict.fromkeys(DIAGNOSED)
        self.last_step = None if previous is None else previous - s.x
        amends = "g_a" in vars(s)
        self.direction = s.g_a if amends else self.last_step
        alpha = getattr(algorithm, "alpha", 1.0) if amends else 1.0
        self.z: Tensor | None = None
        if alpha == 1 or t == 0:
            self.z = s.x
        elif alpha and self.last_step is not None:
            self.z = s.x - (1 - alpha) / alpha * self.last_step

    @property
    def points(self) -> int:
        """At how many points the gradient is taken."""
        return 1 + (self.z is not None and self.z is not self.s.x)

    def begin(self, gradient: Callable[[Tensor], Tensor]) -> None:
        """At x^t and z^t; ``gradient`` gives that of F, in a buffer that the next call overwrites."""
        at_x = gradient(self.s.x)
        self.numbers["gradient_norm"] = norm = _dot(at_x, at_x) ** 0.5
        self.numbers["direction_cosine"] = _cosine(self.direction, at_x)
        if self.points == 2:
            assert self.z is not None
            at_z = gradient(self.z)
            norm = _dot(at_z, at_z) ** 0.5
        self.numbers["gradient_norm_z"] = None if self.z is None else norm

    def end(self, x_previous: Tensor, drift: float | None) -> dict[str, float | None]:
        """All numbers, once ``s.x`` is x^{t+1}; ``x_previous`` is x^t."""
        step, last = x_previous - self.s.x, self.last_step
        norm2 = _dot(step, step)
        self.numbers["drift"] = drift
        if drift is not None and norm2:
            self.numbers["drift_ratio"] = drift / norm2
        self.numbers["step_cosine"] = _cosine(last, step)
        if last is not None and norm2:
            self.numbers["step_change"] = _dot(step - last, step - last) / norm2
        return self.numbers


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.double(), b.double()))


def _cosine(a: Tensor | None, b: Tensor) -> float | None:
    """None where a vector is unknown or zero."""
    if a is None or not (norms := (_dot(a, a) * _dot(b, b)) ** 0.5):
        return None
    return _dot(a, b) / norms
