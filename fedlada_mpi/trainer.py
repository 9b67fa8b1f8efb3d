"""Local training of all of a rank's participants at once, on stacked [C, d] tensors.

A step is: gather the batches, gradients of C models, clip, the method's direction, move. On the CPU it runs
as written; on the GPU the step is captured once per number of clients as a CUDA graph, its elementwise part
fused into one kernel, and replayed K times without the host.

Elements that never have a gradient (``Layout.live`` counts the others) move alike on all clients under most
methods; they are then stepped once for all, as a second, single-row part of the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from .algorithms import Algorithm, Round, Vectors
from .batches import Normaliser, Plan, gather, local_steps, plan
from .config import Config
from .errors import UserError
from .evaluate import Evaluation
from .gradients import Generic, Stacked
from .graphs import Capture
from .models.beside import Beside


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


def local_step(algorithm: Algorithm, c: Vectors, s: Vectors, lr: Tensor, silent: bool, keep_g: bool) -> None:
    """One local step of the method from the gradients ``c.g``, in place; ``c.g`` is overwritten unless kept.

    ``silent`` elements have no gradient, nothing to clip and no ``c.g``.
    """
    config = algorithm.config
    g = torch.zeros_like(c.x) if silent else c.g.to(c.x.dtype, copy=keep_g)
    g = algorithm.amend(c, s, g)
    if config.clip and not silent:
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
        self, config: Config, algorithm: Algorithm, gradient: Stacked | Generic, data: Resident, device, dtype
    ):
        self.config, self.algorithm, self.gradient, self.data = config, algorithm, gradient, data
        self.device, self.dtype = device, dtype
        layout = gradient.network.layout
        self.size = layout.size
        self.live = layout.live if algorithm.silent_alike else layout.size
        # Elements of c.g that no layer writes must stay zero, so the step works on a copy where there are any.
        self.keep_g = self.live > layout.live
        self.compute = torch.bfloat16 if config.precision == "bf16" else dtype
        self.kernels = getattr(gradient, "kernels", None)
        self.kept: dict[str, dict[int, Tensor]] = {name: {} for name in algorithm.kept}
        self.longest = int(local_steps(config, data.sizes).max()) if len(data.sizes) else 0
        self.width = int(min(config.batch_size or 2**62, data.sizes.max())) if len(data.sizes) else 0
        self.at_once = 0
        self.beside = Beside(device)
        self.capture = Capture() if device.type == "cuda" else None
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._step = local_step
        if self.kernels is not None:
            from .fuse import Fused  # which imports Triton

            self._step = Fused(local_step)

    @cached_property
    def bytes_per_client(self) -> int:
        """Stacked state of one client, and its activations."""
        vectors = 1 + len(self.algorithm.slots) + len(self.algorithm.kept)
        low = 2 * self.compute.itemsize if self.compute != self.dtype else self.dtype.itemsize
        state = self.live * (vectors * self.dtype.itemsize + low)
        return state + self.gradient.activation_bytes(tuple(self.data.images.shape[1:]), self.width, self.compute)

    @property
    def bytes_beside(self) -> int:
        """State that does not depend on the number of clients: the silent elements', where clients share them."""
        vectors = 1 + len(self.algorithm.slots)
        return (self.size - self.live) * vectors * self.dtype.itemsize

    def _allocate(self, count: int) -> None:
        """Stacked buffers for ``count`` clients, zero."""
        self._graphs.clear()
        self.gradient.forget()
        self.at_once = count
        self.c = self._vectors(count, self.live)
        self.c.g = self._zeros(count, self.live, dtype=self.compute)
        self.tail = self._vectors(count if self._uneven() else 1, self.size - self.live)
        self.tail.low = None
        self.loss, self.lr, self.k = self._zeros(count), self._zeros(()), self._zeros(1, dtype=torch.int64)
        shape = (self.longest, count, self.width)
        kinds = dict(index=torch.int64, weight=self.dtype, flip=torch.bool, down=torch.int32, right=torch.int32)
        self.plan = Plan(**{name: self._zeros(shape, dtype=kind) for name, kind in kinds.items()})

    def _zeros(self, *shape, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*shape, dtype=dtype or self.dtype, device=self.device)

    def _vectors(self, count: int, size: int) -> Vectors:
        names = ("x", *self.algorithm.slots, *self.algorithm.kept)
        c = Vectors(**{name: self._zeros(count, size) for name in names})
        c.low = self._zeros(count, size, dtype=self.compute) if self.compute != self.dtype else None
        c.steps = self._zeros(count, 1)
        return c

    def _uneven(self) -> bool:
        """Whether clients of this rank differ in their number of steps."""
        return len(np.unique(local_steps(self.config, self.data.sizes))) > 1

    def _parts(self, s: Vectors, count: int) -> list[tuple[Vectors, Vectors]]:
        """The first ``count`` clients' state with the server's vectors: live elements, then silent ones."""
        parts = [(_rows(self.c, count), Vectors(**{n: v[: self.live] for n, v in vars(s).items()}))]
        if self.live < self.size:
            parts.append((_rows(self.tail, count), Vectors(**{n: v[self.live :] for n, v in vars(s).items()})))
        return parts

    def _one_step(self, parts: list[tuple[Vectors, Vectors]], batch: Plan) -> None:
        (c, s), *silent = parts
        for tail in silent:
            self.beside(partial(self._step, self.algorithm, *tail, self.lr, True, True))
        values = c.x if c.low is None else c.low
        labels = self.data.labels[batch.index]
        self.loss[: len(c.x)].add_(self.gradient(values, c.g, self._gather(batch), labels, batch.weight))
        self._step(self.algorithm, c, s, self.lr, False, self.keep_g)
        self.beside.join()

    def _gather(self, b: Plan) -> Tensor:
        images, normalise = self.data.images, self.data.normalise
        if self.kernels is not None:
            return self.kernels.gather(
                images, b.index, b.flip, b.down, b.right, normalise.mean, normalise.std, self.compute
            )
        return gather(images, b, normalise, self.compute, self.config.augment == "paper")

    def _steps(self, s: Vectors, count: int, first: int, last: int) -> None:
        """Local steps first .. last-1 of the first ``count`` clients."""
        if self.device.type == "cuda":
            for _ in range(first, last):
                self._graphs[count, s.x.data_ptr()].replay()
            return
        parts = self._parts(s, count)
        for k in range(first, last):
            self._one_step(parts, self.plan.at(k, count))

    def _capture(self, s: Vectors, count: int) -> None:
        """The step of ``count`` clients as a graph; the trial runs before it move the state."""
        parts = self._parts(s, count)

        def step() -> None:
            self._one_step(parts, self.plan.at(self.k, count))
            self.k.add_(1).remainder_(self.longest)

        self._graphs[count, s.x.data_ptr()] = self.capture(step)

    def _chunks(self, rows: np.ndarray, steps: np.ndarray) -> Iterator[np.ndarray]:
        """Participants that train together; within a chunk, longest first, so that those still running are a prefix."""
        limit = self.config.max_clients_at_once or self.room() or len(rows)
        yield from np.array_split(rows[np.argsort(-steps, kind="stable")], -(-len(rows) // limit))

    def room(self) -> int:
        """How many clients fit on the GPU together, 0 where no limit is known."""
        if self.device.type != "cuda":
            return 0
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        return max(1, self.at_once, int(0.8 * free / self.bytes_per_client))

    def evaluation(self, x: Tensor, images: Tensor, labels: Tensor) -> Evaluation:
        """Of the model ``x`` on ``images``, in this trainer's precision."""
        return Evaluation(self.gradient, x, images, labels, self.data.normalise, self.compute, self.capture)

    @torch.no_grad()
    def round(self, s: Vectors, r: Round, participants: np.ndarray, sums: dict[str, Tensor]) -> Totals:
        """Train the rank's ``participants`` and add their weighted contributions to ``sums``."""
        totals = Totals()
        rows = np.flatnonzero(np.isin(self.data.client_ids, participants))
        if len(rows):
            for chunk in self._chunks(rows, local_steps(self.config, self.data.sizes[rows])):
                try:
                    self._train(s, r, chunk, sums, totals)
                except torch.cuda.OutOfMemoryError as error:
                    raise UserError(_too_large(len(chunk), str(error))) from None
        return totals

    def _train(self, s: Vectors, r: Round, chunk: np.ndarray, sums: dict[str, Tensor], totals: Totals) -> None:
        data, count = self.data, len(chunk)
        clients, sizes = data.client_ids[chunk], data.sizes[chunk]
        steps = local_steps(self.config, sizes)
        lengths = [(int((steps >= length).sum()), length) for length in np.unique(steps).tolist()]
        if count > self.at_once:
            self._allocate(count)
        self._load_plan(plan(self.config, r.t, clients, data.starts[chunk], sizes, self.width, self.dtype))
        self.lr.fill_(r.lr)
        parts = self._parts(s, count)
        self._begin(parts, clients, steps)
        missing = [n for n, _ in lengths if self.device.type == "cuda" and (n, s.x.data_ptr()) not in self._graphs]
        for running in missing:
            self._capture(s, running)
        if missing:
            self._begin(parts, clients, steps)

        done = 0
        for running, length in lengths:
            self._steps(s, running, done, length)
            done = length

        weights = sizes.astype(float) if self.config.weighting == "size" else np.ones(count)
        norms2 = self._zeros(count, dtype=torch.float64)
        for (c, part), where in zip(parts, (slice(0, self.live), slice(self.live, None))):
            sent = self.algorithm.finish(c, part, r)
            # Row by row: in double, all rows at once would take twice the offsets' memory.
            norms2 += torch.stack(
                [torch.linalg.vector_norm(row, dtype=torch.float64) for row in sent["offset"]]
            ).square()
            shares = weights if len(c.x) == count else [weights.sum()]
            for name, rows in sent.items():
                for weight, row in zip(shares, rows):
                    sums[name][where].add_(row, alpha=float(weight))
            for name, kept in self.kept.items():
                for row, client in zip(getattr(c, name), clients.tolist()):
                    kept.setdefault(client, torch.empty_like(row)).copy_(row)
        local = self.loss[:count].double().cpu().numpy() / steps
        totals.loss += float(local.sum())
        totals.offset_norm2 += float((norms2.cpu().numpy() * weights).sum())

    def _begin(self, parts: list[tuple[Vectors, Vectors]], clients: np.ndarray, steps: np.ndarray) -> None:
        self.k.zero_()
        self.loss.zero_()
        for c, s in parts:
            c.steps.copy_(torch.from_numpy(steps[: len(c.steps)]).unsqueeze(1))
            for name, kept in self.kept.items():
                for row, client in zip(getattr(c, name), clients.tolist()):
                    row.copy_(kept[client]) if client in kept else row.zero_()
            self.algorithm.begin(c, s)
            if c.low is not None:
                c.low.copy_(c.x)

    def _load_plan(self, made: Plan) -> None:
        for f in fields(Plan):
            host = getattr(made, f.name)
            getattr(self.plan, f.name)[: host.shape[0], : host.shape[1]].copy_(host)


def _too_large(count: int, words: str) -> str:
    """What to do when ``count`` clients do not fit on the GPU."""
    do = f"--max-clients-at-once {count // 2} trains them in turns, with the same result"
    if count == 1:
        do = "--precision bf16 takes less, or share the GPU with fewer ranks"
    asked = ". ".join(words.splitlines()[0].split(". ")[:2]).rstrip(".")
    return f"{count} client{'s' * (count > 1)} at once do not fit in the GPU's memory ({asked}); {do}"


def _rows(c: Vectors, count: int) -> Vectors:
    return Vectors(**{name: None if v is None else v[:count] for name, v in vars(c).items()})
