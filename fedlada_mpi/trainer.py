"""Local training of all of a rank's participants at once, on stacked [C, d] tensors.

A step is: gather the batches, gradients of C models, clip, the method's direction, move. On the CPU it runs
as written; on the GPU the step is captured once per number of clients as a CUDA graph, its elementwise part
compiled into one kernel, and replayed K times without the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from .algorithms import Algorithm, Round, Vectors
from .batches import Normaliser, Plan, gather, local_steps, plan
from .config import Config
from .gradients import Generic, Stacked


@dataclass
class Resident:
    """A rank's images and labels on its device, and where each of its clients' lie."""

    images: Tensor  # uint8 [n, H, W, ch]
    labels: Tensor  # int64 [n]
    client_ids: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    normalise: Normaliser


@dataclass
class Totals:
    """What a round's local training adds up to on this rank."""

    loss: float = 0.0  # mean local loss, summed over participants
    offset_norm2: float = 0.0  # weighted sum of ||offset_i||^2
    images: int = 0


def local_step(algorithm: Algorithm, c: Vectors, s: Vectors, lr: Tensor) -> None:
    """One local step from the gradient ``c.g``, in place; ``c.g`` itself is left alone, as its dead elements stay zero."""
    config = algorithm.config
    g = algorithm.amend(c, s, c.g.to(c.x.dtype, copy=True))
    if config.clip:
        norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
        g = g.mul_((config.clip / norm).clamp_(max=1))
    if config.weight_decay and config.decay_mode == "l2":
        g = g.add_(c.x, alpha=config.weight_decay)
    direction = algorithm.direction(c, s, g)
    if config.weight_decay and config.decay_mode == "decoupled":
        direction = direction.add_(c.x, alpha=config.weight_decay)
    c.x.sub_(direction.mul_(lr))
    if c.low is not None:
        c.low.copy_(c.x)


class Trainer:
    def __init__(
        self, config: Config, algorithm: Algorithm, gradient: Stacked | Generic, data: Resident, size: int, device, dtype
    ):
        self.config, self.algorithm, self.gradient, self.data = config, algorithm, gradient, data
        self.device, self.dtype, self.size = device, dtype, size
        self.compute = torch.bfloat16 if config.precision == "bf16" else dtype
        self.kernels = getattr(gradient, "kernels", None)
        self.kept: dict[str, dict[int, Tensor]] = {name: {} for name in algorithm.kept}
        steps = local_steps(config, data.sizes) if len(data.sizes) else np.zeros(1, np.int64)
        self.longest = int(steps.max())
        self.width = int(min(config.batch_size or 2**62, data.sizes.max())) if len(data.sizes) else 0
        self.at_once = 0
        self.c = Vectors()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._step = local_step
        if device.type == "cuda" and config.compile != "off" and self.kernels is not None:
            self._step = torch.compile(local_step, dynamic=True)

    def bytes_per_client(self) -> int:
        """Stacked state of one client: x, gradient, slots, and the low-precision copy."""
        vectors = 1 + len(self.algorithm.slots) + len(self.algorithm.kept)
        low = 2 * torch.bfloat16.itemsize if self.compute != self.dtype else self.dtype.itemsize
        return self.size * (vectors * self.dtype.itemsize + low)

    def _allocate(self, count: int) -> None:
        """Stacked buffers for ``count`` clients, zero (a gradient's dead elements must be)."""
        self._graphs.clear()
        self.at_once = count
        names = ("x", *self.algorithm.slots, *self.algorithm.kept)
        zeros = lambda *shape, dtype=self.dtype: torch.zeros(*shape, dtype=dtype, device=self.device)  # noqa: E731
        self.c = Vectors(**{name: zeros(count, self.size) for name in names})
        self.c.g = zeros(count, self.size, dtype=self.compute)
        self.c.low = zeros(count, self.size, dtype=self.compute) if self.compute != self.dtype else None
        self.c.steps = zeros(count, 1)
        self.c.loss = zeros(count)
        self.lr = zeros(())
        self.k = torch.zeros(1, dtype=torch.int64, device=self.device)
        shape = (self.longest, count, self.width)
        kinds = dict(index=torch.int64, weight=self.dtype, flip=torch.bool, down=torch.int32, right=torch.int32)
        self.plan = Plan(**{name: zeros(shape, dtype=kind) for name, kind in kinds.items()})

    def _first(self, count: int) -> Vectors:
        return Vectors(**{name: None if v is None else v[:count] for name, v in vars(self.c).items()})

    def _one_step(self, c: Vectors, s: Vectors, batch: Plan) -> None:
        images = self._gather(batch)
        values = c.x if c.low is None else c.low
        c.loss.add_(self.gradient(values, c.g, images, self.data.labels[batch.index], batch.weight))
        self._step(self.algorithm, c, s, self.lr)

    def _gather(self, b: Plan) -> Tensor:
        images, normalise = self.data.images, self.data.normalise
        if self.kernels is not None:
            return self.kernels.gather(images, b.index, b.flip, b.down, b.right, normalise.mean, normalise.std, self.compute)
        return gather(images, b, normalise, self.compute, self.config.augment == "paper")

    def _steps(self, count: int, s: Vectors, first: int, last: int) -> None:
        """Local steps first .. last-1 of the first ``count`` clients."""
        if self.device.type != "cuda":
            c = self._first(count)
            for k in range(first, last):
                self._one_step(c, s, self.plan.at(k, count))
            return
        if count not in self._graphs:
            self._capture(count, s)
        for _ in range(first, last):
            self._graphs[count].replay()

    def _capture(self, count: int, s: Vectors) -> None:
        """The step of ``count`` clients as a graph; what the trial runs change is put back."""
        c = self._first(count)
        before = {name: v.clone() for name, v in vars(c).items() if v is not None}
        k = self.k.clone()

        def step() -> None:
            self._one_step(c, s, self.plan.at(self.k, count))
            self.k.add_(1)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.k.copy_(k)
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.k.copy_(k)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            step()
        self._graphs[count] = graph
        for name, value in before.items():
            getattr(c, name).copy_(value)

    def _chunks(self, rows: np.ndarray, steps: np.ndarray) -> Iterator[np.ndarray]:
        """Participants that train together; within a chunk, longest first, so that those still running are a prefix."""
        limit = self.config.max_clients_at_once or self._room() or len(rows)
        parts = -(-len(rows) // limit)
        for chunk in np.array_split(rows[np.argsort(-steps, kind="stable")], parts):
            yield chunk

    def _room(self) -> int:
        """How many clients' states and activations fit on the GPU; 0 = no limit known."""
        if self.device.type != "cuda":
            return 0
        free = torch.cuda.mem_get_info(self.device)[0] + self.at_once * self.bytes_per_client()
        return max(1, int(0.8 * free / (2.5 * self.bytes_per_client())))

    @torch.no_grad()
    def round(self, s: Vectors, r: Round, participants: np.ndarray, sums: dict[str, Tensor]) -> Totals:
        """Train the rank's ``participants`` and add their weighted contributions to ``sums``."""
        data, totals = self.data, Totals()
        rows = np.flatnonzero(np.isin(data.client_ids, participants))
        if not len(rows):
            return totals
        for chunk in self._chunks(rows, local_steps(self.config, data.sizes[rows])):
            clients, sizes = data.client_ids[chunk], data.sizes[chunk]
            steps = local_steps(self.config, sizes)
            count = len(chunk)
            if count > self.at_once:
                self._allocate(count)
            c = self._first(count)
            self.lr.fill_(r.lr)
            self.k.zero_()
            c.loss.zero_()
            c.steps.copy_(torch.from_numpy(steps).unsqueeze(1))
            made = plan(self.config, r.t, clients, data.starts[chunk], sizes, self.width, self.dtype)
            for f in fields(Plan):
                host = getattr(made, f.name)
                getattr(self.plan, f.name)[: len(host), :count].copy_(host)
            for name, kept in self.kept.items():
                for i, client in enumerate(clients.tolist()):
                    getattr(c, name)[i].copy_(kept[client]) if client in kept else getattr(c, name)[i].zero_()
            self.algorithm.begin(c, s)
            if c.low is not None:
                c.low.copy_(c.x)

            done = 0
            for length in np.unique(steps).tolist():
                self._steps(int((steps >= length).sum()), s, done, length)
                done = length

            sent = self.algorithm.finish(c, s, r)
            weights = sizes.astype(float) if self.config.weighting == "size" else np.ones(count)
            norms = torch.linalg.vector_norm(sent["offset"], dim=1, dtype=torch.float64)
            for name, rows_sent in sent.items():
                for weight, row in zip(weights.tolist(), rows_sent):
                    sums[name].add_(row, alpha=weight)
            for name, kept in self.kept.items():
                for i, client in enumerate(clients.tolist()):
                    kept.setdefault(client, torch.empty_like(s.x)).copy_(getattr(c, name)[i])
            scalars = torch.stack((c.loss.double() / c.steps[:, 0].double(), norms.square())).cpu().numpy()
            totals.loss += float(scalars[0].sum())
            totals.offset_norm2 += float((scalars[1] * weights).sum())
            totals.images += int((steps * np.minimum(self.config.batch_size or 2**62, sizes)).sum())
        return totals
