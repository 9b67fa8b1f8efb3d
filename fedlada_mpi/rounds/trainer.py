"""Local training of a rank's participants, all at once on stacked [C, d] tensors.

A step gathers the batches, computes the gradients of C models and takes the method's local step
(``algorithms/step.py``). On the CPU it runs as written; on the GPU it is captured once per number of clients as a
CUDA graph, its elementwise part fused into one kernel, and replayed K times without the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Algorithm, ClientVectors, Round, Vectors, blocked_step
from ..algorithms.base import rows
from ..algorithms.hook_draws import client_draws, client_keys
from ..algorithms.step import local_step
from ..gpu.graphs import Capture
from ..gpu.limits import TooManyElements
from ..gpu.side_stream import SideStream
from ..models.form import Stored, each
from ..settings import Config
from ..support import rng
from ..support.errors import UserError
from .aggregate import Collector, Part, Sent
from .augmentation import Augmentation
from .batches import Batch, LocalData, Normaliser, Plan, PlanBuffer, all_batches, by_counts, gather, local_steps, plan
from .clients import ClientBuffers, ClientState, MemoryEstimate, Parts
from .costs import chunk_count, stack_width
from .gradients import Engine
from .vectors import is_finite, quick_row_norms

if TYPE_CHECKING:
    from ..gpu.fuse import Fused


class Trainer:
    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        engine: Engine,
        data: LocalData,
        device: torch.device,
        dtype: torch.dtype,
        capture: Capture | None = None,
        augmentation: Augmentation | None = None,
    ):
        self.augmentation = augmentation
        self.counts: Tensor | None = None  # of the rank's examples, where the loss gives sums and counts
        self.config, self.algorithm, self.engine, self.data, self.device = config, algorithm, engine, data, device
        self.compute = torch.bfloat16 if config.precision == "bf16" else dtype
        self.buffers = ClientBuffers(config, algorithm, engine.network.layout, data, device, dtype, self.compute)
        self.client_state = ClientState(algorithm.client_state)
        self.memory = MemoryEstimate(self.buffers, engine, data)
        self.width = stack_width(config)
        self.side_stream = SideStream(device)
        self.steps = _steps(self.buffers, "plan", capture, self.side_stream)
        self.full_pass = _steps(self.buffers, "all_batches", capture, self.side_stream)
        self.plans_ahead = capture is not None and config.dp == "none"  # whose participants nobody knows yet
        self.ahead: tuple[int, list[int], Any] = (-1, [], None)  # round, rows of its first chunk, their plan
        self.blocked = device.type == "cpu" and blocked_step.is_elementwise(algorithm)
        self.local_step: LocalStep = local_step
        self.fused: Fused | None = None
        if engine.kernels is not None and algorithm.fusable and not algorithm.traits.draws:
            from ..gpu.fuse import Fused  # which imports Triton

            self.local_step = self.fused = Fused(local_step)
        elif self.blocked:
            self.local_step = blocked_step.BlockedStep()

    @torch.no_grad()
    def round(self, s: Vectors, r: Round, participants: np.ndarray, collector: Collector) -> list[int]:
        """Train this rank's ``participants`` and add what they send; returns those whose result is not finite.

        They send nothing, and keep the state that they had.
        """
        collector.begin(int(np.isin(self.data.client_ids, participants).sum()))
        nonfinite: list[int] = []
        for chunk in self._chunks(participants):
            try:
                nonfinite += self._train(s, r, chunk, collector)
            except TooManyElements as error:
                raise UserError(_too_many_elements(len(chunk), str(error))) from None
            except torch.cuda.OutOfMemoryError as error:
                raise UserError(_out_of_memory(len(chunk), str(error))) from None
        return nonfinite

    def _chunks(self, participants: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of the rank's participants that train together."""
        rows = np.flatnonzero(np.isin(self.data.client_ids, participants))
        fit = len(rows) <= self.buffers.capacity  # known without asking the GPU, which takes a while
        limit = self.config.max_clients_at_once or (0 if fit else self.memory.clients_that_fit)
        return chunks(rows, local_steps(self.config, self.data.sizes[rows]), limit, alike=self.width > 0)

    def _train(self, s: Vectors, r: Round, chunk: np.ndarray, collector: Collector) -> list[int]:
        """Train the clients of a chunk: begin, their local steps, then what they send."""
        data, buffers, stack = self.data, self.buffers, self._stack(chunk)
        clients, sizes = data.client_ids[stack], data.sizes[stack]
        steps = local_steps(self.config, sizes)
        if len(stack) > buffers.capacity:
            self.steps.clear()
            self.full_pass.clear()
            self.engine.release_buffers()
            buffers.allocate(len(stack))
        planned = self._planned(r.t, chunk)
        self._load(buffers.plan, planned)
        buffers.lr.fill_(r.lr)
        if self.algorithm.traits.draws:
            buffers.keys[: len(stack)].copy_(client_keys(self.algorithm, r.t, data.numbers[stack]))
        parts = buffers.parts(s, len(stack))
        self._begin(parts, r, clients, steps)
        # Clients that take fewer steps than others leave after theirs; the longest come first.
        schedule = [(int((steps >= length).sum()), length) for length in np.unique(steps).tolist()]
        if self.steps.prepare(self._step, s, [running for running, _ in schedule]):
            self._begin(parts, r, clients, steps)
        if self.algorithm.full_gradient:
            batches = all_batches(*self._plan_of(r.t, chunk))
            self._full_gradient(parts, s, batches if self.counts is None else by_counts(batches, self.counts))
        done = 0
        for running, length in schedule:
            self._step_gradient_free(buffers.parts(s, running)[1:], length - done)
            for first, last in buffers.window.blocks(planned.index, done, length):
                self.steps.run(self._step, s, running, first, last)
            done = length
        self.side_stream.join()
        clients, sizes, steps = (each[: len(chunk)] for each in (clients, sizes, steps))
        weights = sizes.astype(float) if self.config.weighting == "size" else np.ones(len(chunk))
        finite = self._finish(parts, r, clients, weights, steps, collector)
        return clients[~finite].tolist()

    def _load(self, buffer: PlanBuffer, batches: Plan) -> None:
        index = self.buffers.window.index(*batches.keys.shape)
        buffer.load(batches, self.data.examples.labels, index)

    def _stack(self, chunk: np.ndarray) -> np.ndarray:
        """The rows of a chunk, and its last one again for what is missing to the width of all stacks."""
        return np.pad(chunk, (0, max(0, self.width - len(chunk))), "edge")

    def _plan_of(self, t: int, chunk: np.ndarray) -> tuple[Any, ...]:
        """The arguments of ``plan`` for the batches of a chunk in round ``t``."""
        data, buffers, stack = self.data, self.buffers, self._stack(chunk)
        numbers, starts, sizes = data.numbers[stack], data.starts[stack], data.sizes[stack]
        return self.config, t, numbers, starts, sizes, buffers.batch_width, buffers.dtype

    def _planned(self, t: int, chunk: np.ndarray) -> Plan:
        if (t, chunk.tolist()) == self.ahead[:2]:
            return self.ahead[2]
        return plan(*self._plan_of(t, chunk))

    def plan_ahead(self, t: int) -> None:
        """The first batches of round ``t``, whose participants are known before the server calls them."""
        c = self.config
        if t >= c.rounds or self.ahead[0] == t:
            return
        participants = rng.participants(c.clients, c.participation, c.sampling, c.seed, t)
        chunk = next(self._chunks(participants), None)
        if chunk is not None:
            self.ahead = (t, chunk.tolist(), plan(*self._plan_of(t, chunk)))

    def _draws(self, hook: str, keys: Tensor, step_keys: Tensor | int = 0) -> AbstractContextManager[object]:
        """What a hook of the clients draws."""
        return client_draws(self.algorithm, hook, keys, step_keys, self.buffers.real)

    def _begin(self, parts: Parts, r: Round, clients: np.ndarray, steps: np.ndarray) -> None:
        self.buffers.k.zero_()
        self.buffers.loss.zero_()
        for c, s in parts:
            c.steps.copy_(torch.from_numpy(steps[: len(c.steps)]).unsqueeze(1))
            if self.algorithm.step_index:
                c.k.zero_()
            keys = self.buffers.keys[: len(c.x)]
            for i in self.client_state.load(c, clients.tolist()):
                with self._draws("enter", keys[i : i + 1]):
                    self.algorithm.enter(rows(c, slice(i, i + 1)), s)
            if self.blocked:
                blocked_step.begin(self.algorithm, c, s, r)
            else:
                with self._draws("begin", keys):
                    self.algorithm.begin(c, s, r)
            if c.compute_copy is not None:
                c.compute_copy.copy_(c.x)

    def _full_gradient(self, parts: Parts, s: Vectors, batches: Plan) -> None:
        """``c.full_g``, at the clients' present ``c.x``."""
        count, buffers = len(parts[0][0].x), self.buffers
        self._load(buffers.all_batches, batches)
        self.full_pass.prepare(self._add_gradient, s, [count])
        buffers.k.zero_()
        for c, _ in parts:
            c.full_g.zero_()
        for first, last in buffers.window.blocks(batches.index, 0, len(batches.keys)):
            self.full_pass.run(self._add_gradient, s, count, first, last)
        buffers.k.zero_()

    def _add_gradient(self, parts: Parts, batch: Batch) -> None:
        c, _ = parts[0]
        self.engine.gradients(_values(c), c.g, *self._drawn(batch))
        c.full_g.add_(c.g)

    def _drawn(self, batch: Batch) -> tuple[Stored, Tensor, Tensor, Tensor]:
        """Inputs, targets, weights and keys, as ``Engine.gradients`` takes them."""
        labelled = self.data.examples.labels is not None
        targets = batch.labels if labelled else self.buffers.window.targets[batch.index]
        inputs = self.gather(batch)
        if self.augmentation is not None:
            inputs = self.augmentation(inputs, batch.keys)
        return inputs, targets, batch.weight, batch.keys

    def _step(self, parts: Parts, batch: Batch) -> None:
        """One local step of the clients in ``parts``."""
        (c, s), *gradient_free = parts
        tails = [] if self._step_at_once(gradient_free) else gradient_free
        lr = self.buffers.lr
        for tail in tails:
            self.side_stream.submit(partial(self.local_step, self.algorithm, *tail, lr, True, True))
        values, drawn = _values(c), self._drawn(batch)
        losses = None
        if self.algorithm.gradients == 2:
            losses = self.engine.gradients(values, c.g, *drawn)
            c.g1.copy_(c.g)
        keys = self.buffers.keys[: len(c.x)]
        if self.algorithm.moves_point:
            with self._draws("point", keys, batch.keys):
                point = self.algorithm.point(c, s, lr)
            if point is not None:
                values = self.buffers.point[: len(c.x)].copy_(point)
        last = self.engine.gradients(values, c.g, *drawn)
        losses = last if losses is None else losses
        self.side_stream.submit(partial(self.buffers.loss[: len(c.x)].add_, losses), losses)
        with self._draws("step", keys, batch.keys):
            self.local_step(self.algorithm, c, s, lr, False, self.buffers.preserve_g)
        self.side_stream.join()
        if self.algorithm.step_index:
            for each, _ in (parts[0], *tails):
                each.k.add_(1)

    def _step_at_once(self, gradient_free: Parts) -> bool:
        """Whether these take all their steps in one kernel, next to those of the others, which read none of it."""
        return self.fused is not None and all(self.fused.repeats(self.algorithm, *tail) for tail in gradient_free)

    def _step_gradient_free(self, gradient_free: Parts, steps: int) -> None:
        if self.fused is None or not self._step_at_once(gradient_free):
            return
        for part in gradient_free:
            self.side_stream.submit(partial(self._repeat, self.fused, part, steps))

    def _repeat(self, fused: Fused, part: tuple[ClientVectors, Vectors], steps: int) -> None:
        c, s = part
        fused.repeat(self.algorithm, c, s, self.buffers.lr, steps)
        if self.algorithm.step_index:
            c.k.add_(steps)

    def gather(self, b: Batch) -> Stored:
        """The batch of a step, augmented and normalised, in the type that products are computed in."""
        inputs, normalise, kernels = self.buffers.window.inputs, self.data.normalise, self.engine.kernels
        if not isinstance(normalise, Normaliser) or not isinstance(inputs, Tensor):
            return each(inputs, lambda values: normalise(values[b.index], self.compute))
        if kernels is not None:
            return kernels.gather(inputs, b.index, b.flip, b.down, b.right, normalise.mean, normalise.std, self.compute)
        return gather(inputs, b, normalise, self.compute, self.config.augment == "paper")

    def _finish(
        self,
        parts: Parts,
        r: Round,
        clients: np.ndarray,
        weights: np.ndarray,
        taken: np.ndarray,
        collector: Collector,
    ) -> np.ndarray:
        """Add what the clients send, and store their state; returns which have a finite loss and finite vectors.

        The first rows of ``parts`` are theirs, further ones were added to the stack. They took ``taken`` steps. A GPU
        is told all that it has to do before the host waits for any of it.
        """
        own = slice(0, len(clients))
        with self._draws("finish", self.buffers.keys[: len(parts[0][0].x)]):
            sent = [{name: v[own] for name, v in self.algorithm.finish(c, s, r).items()} for c, s in parts]
        parts = [(rows(c, own), s) for c, s in parts]
        scalars = {name: sent[0].pop(name).double().flatten() for name in self.algorithm.scalars}
        norms2, total = torch.zeros(2, len(clients), dtype=torch.float64, device=self.device)
        for vectors in sent:
            for name in self.algorithm.up:
                if name == "offset":
                    norms = quick_row_norms(vectors[name])
                    norms2 += norms.square()
                else:
                    norms = _checked(vectors[name])
                total += norms
            for values in scalars.values():
                total += values
        losses, steps = self.buffers.loss[own].double(), parts[0][0].steps[:, 0].double()
        found = torch.stack((norms2, total, losses, steps, *scalars.values()))
        if self.plans_ahead:  # while the GPU computes
            self.plan_ahead(r.t + 1)
        squares, checked, losses, steps, *numbers = found.cpu().numpy()
        losses = losses / taken
        finite = np.isfinite(checked) & np.isfinite(losses)
        good = np.flatnonzero(finite)
        if len(good):
            named = {name: values[good] for name, values in zip(scalars, numbers, strict=True)}
            contributions = [
                Part(where, vectors, good if len(c.x) == len(clients) else np.zeros_like(good), len(c.x) < len(clients))
                for (c, _), vectors, where in zip(parts, sent, self.buffers.slices, strict=False)
            ]
            steps = steps[good].astype(np.int64)
            collector.add(Sent(clients[good], weights[good], losses[good], squares[good], named, contributions, steps))
            for c, _ in parts:
                self.client_state.store(c, clients.tolist(), finite)
        return finite


def _values(c: ClientVectors) -> Tensor:
    """``c.x`` in the type that products are computed in."""
    return c.x if c.compute_copy is None else c.compute_copy


def _checked(rows: Tensor) -> Tensor:
    """A number for each row that is finite where all of the row is."""
    if rows.is_cuda:  # without waiting for the host
        return torch.linalg.vector_norm(rows, torch.inf, dim=1)
    return torch.tensor([0.0 if is_finite(row) else torch.inf for row in rows])


def chunks(rows: np.ndarray, steps: np.ndarray, limit: int, alike: bool = False) -> Iterator[np.ndarray]:
    """Participants that train together, at most ``limit`` (0: all); longest first, so that those still running are a
    prefix. ``alike``: only those with the same number of steps, so that none leaves before the others."""
    groups = (
        [rows[steps == count] for count in np.unique(steps)[::-1]]
        if alike
        else [rows[np.argsort(-steps, kind="stable")]]
    )
    for group in groups:
        if len(group):
            yield from np.array_split(group, chunk_count(len(group), limit))


class LocalStep(Protocol):
    """``algorithms.step.local_step``, as written or fused."""

    def __call__(
        self, algorithm: Algorithm, c: ClientVectors, s: Vectors, lr: Tensor, gradient_free: bool, preserve_g: bool
    ) -> None: ...


Step: TypeAlias = Callable[[Parts, Batch], None]


class Steps(Protocol):
    """Runs local steps of the first ``count`` clients in the buffers.

    ``step`` is an argument, never stored: a reference back to the trainer would be a cycle, and the garbage collector
    might free its graphs in the middle of another capture, which CUDA does not allow.
    """

    def prepare(self, step: Step, s: Vectors, counts: Sequence[int]) -> bool:
        """Get ready for these numbers of clients; whether that moved their state."""

    def run(self, step: Step, s: Vectors, count: int, first: int, last: int) -> None:
        """Steps first .. last-1."""

    def clear(self) -> None:
        """Forget what refers to the present buffers."""


def _steps(buffers: ClientBuffers, plan: str, capture: Capture | None, side_stream: SideStream) -> Steps:
    """Steps on the batches of a plan, which is an attribute of the buffers."""
    return EagerSteps(buffers, plan) if capture is None else CapturedSteps(buffers, plan, capture, side_stream)


class EagerSteps:
    """Steps as written."""

    def __init__(self, buffers: ClientBuffers, plan: str):
        self.buffers, self.plan = buffers, plan

    def prepare(self, step: Step, s: Vectors, counts: Sequence[int]) -> bool:
        return False

    def run(self, step: Step, s: Vectors, count: int, first: int, last: int) -> None:
        parts = self.buffers.parts(s, count)
        for k in range(first, last):
            step(parts, getattr(self.buffers, self.plan).at(k, count))

    def clear(self) -> None:
        pass


AT_ONCE = 5  # steps in a graph


class CapturedSteps:
    """Steps replayed from CUDA graphs, of one step and of several, per number of clients; steps are counted there."""

    def __init__(self, buffers: ClientBuffers, plan: str, capture: Capture, side_stream: SideStream):
        self.buffers, self.plan, self.capture, self.side_stream = buffers, plan, capture, side_stream
        self.graphs: dict[tuple[int, int], dict[int, torch.cuda.CUDAGraph]] = {}

    def prepare(self, step: Step, s: Vectors, counts: Sequence[int]) -> bool:
        missing = [count for count in counts if (count, s.x.data_ptr()) not in self.graphs]
        for count in missing:
            self._capture(step, s, count)
        return bool(missing)

    def _capture(self, step: Step, s: Vectors, count: int) -> None:
        parts, k, plan = self.buffers.parts(s, count), self.buffers.k, getattr(self.buffers, self.plan)

        def counted_step() -> None:
            batch = plan.at(k, count)
            self.side_stream.submit(lambda: k.add_(1).remainder_(plan.steps))
            step(parts, batch)
            self.side_stream.join()

        one = self.capture(counted_step)
        self.graphs[count, s.x.data_ptr()] = {AT_ONCE: self.capture.repeated(counted_step, AT_ONCE), 1: one}

    def run(self, step: Step, s: Vectors, count: int, first: int, last: int) -> None:
        for steps, graph in self.graphs[count, s.x.data_ptr()].items():
            while first + steps <= last:
                graph.replay()
                first += steps

    def clear(self) -> None:
        self.graphs.clear()


def _too_many_elements(count: int, message: str) -> str:
    """What is too large where ``count`` clients have more numbers than kernels reach."""
    what = "--batch-size is"
    if count > 1:  # frozen layers take the examples of all as one client's
        what = f"--batch-size or, for frozen layers, --max-clients-at-once (here {count}) is"
    return f"{what} too large for a GPU: {message}"


def _out_of_memory(count: int, message: str) -> str:
    """What to do when ``count`` clients do not fit on the GPU."""
    do = f"--max-clients-at-once {count // 2} trains them in turns, with the same result"
    if count == 1:
        do = "--precision bf16 takes less, or share the GPU with fewer ranks"
    tried = ". ".join(message.splitlines()[0].split(". ")[:2]).rstrip(".")
    return f"{count} client{'s' * (count > 1)} at once do not fit in the GPU's memory ({tried}); {do}"
