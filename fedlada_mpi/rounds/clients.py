"""What a rank holds of its clients: stacked buffers of those that train now, and the state they keep across rounds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Algorithm, ClientVectors, Vectors
from ..algorithms.base import rows
from ..algorithms.dry_run import steps_alone
from ..models.layout import Layout
from ..settings import Config
from ..support.errors import UserError
from ..support.processes import machine_memory
from .batches import LocalData, PlanBuffer, local_steps
from .gradients import Engine

# Of one image in a plan: 8 + 8 + 1 + 4 + 4 (see ``Plan``); on the device with its label, and once more on its way.
PLAN_BYTES = 25 + 2 * 33

# Clients' vectors with the server's: of the live parameters, and of the gradient-free ones where clients share them.
Parts: TypeAlias = "list[tuple[ClientVectors, Vectors]]"


class ClientBuffers:
    """Stacked vectors and batch plans of up to ``capacity`` clients; steps work on the first of them.

    Parameters behind ``live`` are the same on all clients: they are a second, single-row part of the state (as many
    rows as clients where these differ in their number of steps).
    """

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        layout: Layout,
        data: LocalData,
        device: torch.device,
        dtype: torch.dtype,
        compute: torch.dtype,
    ):
        self.algorithm, self.device, self.dtype, self.compute = algorithm, device, dtype, compute
        self.examples, self.size = data.examples, layout.size
        self.live = layout.live if layout.live < layout.size and steps_alone(algorithm) else layout.size
        # Elements of c.g that no layer writes must stay zero, so the step works on a copy where there are any. A user's
        # own method may also write to those between parameters.
        self.preserve_g = self.live > layout.live or ":" in config.algorithm
        # One at the elements of parameters, where a method's random numbers belong.
        self.real = layout.real.to(device, dtype) if algorithm.traits.draws else None
        weights_only = config.decay_on == "weights"
        self.shared = {"decays": layout.weights.to(device, dtype)} if weights_only else {}
        steps = local_steps(config, data.sizes)
        self.max_steps = int(steps.max()) if len(steps) else 0
        largest = max(data.largest, int(data.sizes.max())) if len(steps) else 0
        self.batch_width = min(config.batch_size or 2**62, largest)
        self.max_batches = -(-int(data.sizes.max()) // self.batch_width) if len(steps) else 0
        self.uneven = len(np.unique(steps)) > 1
        self.capacity = 0
        self._refuse_long_plans(config, len(steps))

    def _refuse_long_plans(self, config: Config, clients: int) -> None:
        """The batches of a round are planned at once; refuse before that takes more memory than the machine has."""
        together = config.max_clients_at_once or clients * config.participation
        needed = self.max_steps * self.batch_width * max(1.0, together) * PLAN_BYTES
        if needed > (memory := machine_memory()):
            raise UserError(
                f"{self.max_steps} local steps of {self.batch_width} examples take {needed:.1e} bytes for the batches "
                f"of a round, and this machine has {memory:.1e}: lower --local-steps, --local-epochs or "
                "--max-clients-at-once"
            )

    @property
    def state_bytes(self) -> int:
        """Stacked state of one client."""
        vectors = 1 + len(self.algorithm.slots) + len(self.algorithm.client_state)
        gradients = 2 if self.compute != self.dtype else 1
        gradients += self.algorithm.moves_point + (self.algorithm.gradients - 1) + self.algorithm.full_gradient
        return self.live * (vectors * self.dtype.itemsize + gradients * self.compute.itemsize)

    @property
    def shared_bytes(self) -> int:
        """State that does not depend on the number of clients: gradient-free parameters, where clients share them."""
        gradient_free = (self.size - self.live) * (1 + len(self.algorithm.slots)) * self.dtype.itemsize
        return gradient_free + sum(vector.nbytes for vector in self.shared.values())

    def allocate(self, count: int) -> None:
        """Buffers for ``count`` clients, zero."""
        self.capacity = count
        self.c = self._vectors(count, self.live)
        self.c.g = self._zeros(count, self.live, dtype=self.compute)
        self.c.compute_copy = self._zeros(count, self.live, dtype=self.compute) if self.compute != self.dtype else None
        self.tail = self._vectors(count if self.uneven else 1, self.size - self.live)
        self.tail.compute_copy = None
        if self.algorithm.moves_point:
            self.point = self._zeros(count, self.live, dtype=self.compute)
        if self.algorithm.gradients == 2:
            self.c.g1 = self._zeros(count, self.live, dtype=self.compute)
            self.tail.g1 = torch.zeros_like(self.tail.x)
        if self.algorithm.full_gradient:
            self.c.full_g, self.tail.full_g = torch.zeros_like(self.c.x), torch.zeros_like(self.tail.x)
        self.loss, self.lr, self.k = self._zeros(count), self._zeros(), self._zeros(1, dtype=torch.int64)
        self.keys = self._zeros(count, dtype=torch.int64)  # of the random numbers that a method draws
        self.window = self.examples.window(count, self.batch_width)
        self.plan = self._plan(self.max_steps)
        self.all_batches = self._plan(self.max_batches if self.algorithm.full_gradient else 0)

    def _plan(self, steps: int) -> PlanBuffer:
        return PlanBuffer(steps, self.capacity, self.batch_width, self.dtype, self.device)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def _vectors(self, count: int, size: int) -> ClientVectors:
        names = ("x", *self.algorithm.slots, *self.algorithm.client_state)
        c = ClientVectors(**{name: self._zeros(count, size) for name in names})
        c.steps = self._zeros(count, 1)
        if self.algorithm.step_index:
            c.k = self._zeros(count, 1)
        return c

    def parts(self, s: Vectors, count: int) -> Parts:
        """The first ``count`` clients' state with the server's vectors: live parameters, then gradient-free ones."""
        s = Vectors(**vars(s), **self.shared)
        parts = [(rows(self.c, slice(0, count)), _elements(s, self.slices[0]))]
        if self.live < self.size:
            parts.append((rows(self.tail, slice(0, count)), _elements(s, self.slices[1])))
        return parts

    @property
    def slices(self) -> tuple[slice, slice]:
        """Where the two parts are in a flat vector."""
        return slice(0, self.live), slice(self.live, None)


def _elements(s: Vectors, where: slice) -> Vectors:
    return Vectors(**{name: v[where] for name, v in vars(s).items()})


class ClientState:
    """Vectors that clients keep across rounds, by name and client; a client that never trained has none yet."""

    def __init__(self, names: Iterable[str]):
        self.vectors: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        # What they had before; None: nothing.
        self._replaced: dict[str, dict[int, Tensor | None]] | None = None
        self._frozen: dict[str, dict[int, Tensor]] = {name: {} for name in self.vectors}

    def frozen(self) -> dict[str, dict[int, Tensor]]:
        """The vectors as they are now, in the host's memory; those in it are not written to until they are removed
        from what is returned."""
        if any(vector.is_cuda for clients in self.vectors.values() for vector in clients.values()):
            return {name: {i: vector.cpu() for i, vector in clients.items()} for name, clients in self.vectors.items()}
        self._frozen = {name: dict(clients) for name, clients in self.vectors.items()}
        return self._frozen

    def keep_replaced(self) -> None:
        """From now on, keep what is replaced, so that it can be put back; forget what was kept before."""
        self._replaced = {name: {} for name in self.vectors}

    def put_back(self) -> None:
        """The vectors as they were at the last ``keep_replaced``."""
        for name, replaced in (self._replaced or {}).items():
            for client, vector in replaced.items():
                if vector is None:
                    del self.vectors[name][client]
                else:
                    self.vectors[name][client] = vector
        self.keep_replaced()

    def load(self, c: ClientVectors, clients: list[int]) -> list[int]:
        """Into the stacked rows of ``clients``; zero where there is none yet. Returns those rows."""
        new: set[int] = set()
        for name, by_client in self.vectors.items():
            for i, (row, client) in enumerate(zip(getattr(c, name), clients, strict=True)):
                if client in by_client:
                    row.copy_(by_client[client])
                else:
                    row.zero_()
                    new.add(i)
        return sorted(new)

    def store(self, c: ClientVectors, clients: list[int], finite: np.ndarray) -> None:
        """From the stacked rows of ``clients``; those whose result is not finite keep what they had."""
        for name, by_client in self.vectors.items():
            for row, client, good in zip(getattr(c, name), clients, finite.tolist(), strict=True):
                if not good:
                    continue
                if self._replaced is not None and client not in self._replaced[name]:
                    self._replaced[name][client] = by_client.pop(client, None)
                elif by_client.get(client) is self._frozen[name].get(client):
                    by_client.pop(client, None)
                by_client.setdefault(client, torch.empty_like(row)).copy_(row)


class MemoryEstimate:
    """What clients take on this rank's device, predicted from the shapes."""

    def __init__(self, buffers: ClientBuffers, engine: Engine, data: LocalData):
        self.buffers, self.engine, self.data = buffers, engine, data

    @cached_property
    def per_client(self) -> int:
        """Stacked state of one client, and its activations."""
        b = self.buffers
        streamed = b.examples.window_bytes(b.batch_width)
        return b.state_bytes + streamed + self.engine.activation_bytes(b.batch_width, b.compute)

    @property
    def resident(self) -> int:
        """What the rank holds however many clients train: its data, what clients share, and what they keep."""
        b = self.buffers
        kept = len(self.data.client_ids) * len(b.algorithm.client_state) * b.live * b.dtype.itemsize
        return self.data.nbytes + b.shared_bytes + kept

    @property
    def clients_that_fit(self) -> int:
        """How many clients fit on the GPU together, 0 where no limit is known."""
        device = self.buffers.device
        if device.type != "cuda":
            return 0
        # Of what torch holds, the buffers of clients make way for larger ones; the rest, such as the images, stays.
        buffers = self.buffers.capacity * self.buffers.state_bytes
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused + buffers
        return max(1, self.buffers.capacity, int(0.8 * free / self.per_client))
