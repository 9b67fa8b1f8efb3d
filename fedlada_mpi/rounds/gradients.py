"""Gradients of C models at once, each on its own batch, written into the flat [C, d] gradient.

``StackedEngine`` runs the channels-last layers of ``models/layers.py``; ``GenericEngine`` runs any ``nn.Module``
through ``torch.func`` or, one client after another, through autograd. They agree to rounding; the second takes any
model but costs more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..gpu.side_stream import SideStream
from ..models import Network, form, vocabulary
from ..models.agreement import perturbed
from ..models.form import Stored
from ..models.parameters import dense, outputs_with, tensors, tied, while_holding
from ..models.stack import Kernels, Stack
from ..settings import Config
from ..support import autograd
from ..support.errors import UserError, first_line
from ..support.randomness import Draws
from ..support.user_code import users_code
from ..tasks.client_loss import CROSS_ENTROPY, ClientLoss, CrossEntropy
from .device import refuse_unrepeatable


class Engine(ABC):
    """The gradients and outputs of a network, whose parameters are rows of a matrix."""

    network: Network
    loss: ClientLoss
    kernels: Kernels | None = None  # compiled ones, where they can run
    capturable = True  # as a CUDA graph
    description = "stacked"

    @abstractmethod
    def gradients(
        self, values: Tensor, grads: Tensor, inputs: Stored, targets: Tensor, weight: Tensor, keys: Tensor | None
    ) -> Tensor:
        """The losses [C] of ``values`` [C, d] on the batches, and their gradients into ``grads``.

        ``keys`` [C] are those of the random numbers that layers draw; None: the network is in evaluation mode.
        """

    @abstractmethod
    def outputs(self, x: Tensor, inputs: Stored, dtype: torch.dtype | None = None) -> Tensor:
        """Of one model ``x`` [d] on examples [N, ...], with products in ``dtype`` (None: that of x)."""

    @abstractmethod
    def activation_bytes(self, examples: int, dtype: torch.dtype) -> int:
        """What a client with batches of ``examples`` takes in addition to its state; 0 where unknown."""

    def release_buffers(self) -> None:  # noqa: B027  (one engine has none)
        """Let go of buffers that are no longer used."""


COMPUTED_IN = {"fp64": torch.float64, "bf16": torch.bfloat16}  # the other precisions in float32


def create_engine(network: Network, config: Config, device: torch.device, loss: ClientLoss = CROSS_ENTROPY) -> Engine:
    """The engine of ``network`` on ``device``; with compiled kernels where they can run (they sum in float32)."""
    if network.forward is None:
        if config.engine == "stacked":
            raise UserError(f"--engine stacked: {network.untraceable_because}; use --engine generic or auto")
        if config.sums == "exact" and device.type == "cuda":
            refuse_unrepeatable(True)
        return GenericEngine(network, device, COMPUTED_IN.get(config.precision, torch.float32), loss)
    engines = [StackedEngine(network, device=device, loss=loss)]
    if device.type == "cuda" and config.compile != "off" and config.precision != "fp64":
        # Here, as importing Triton takes time that no other run need spend.
        from ..gpu import layer_kernels

        if layer_kernels.available():
            engines.insert(0, StackedEngine(network, layer_kernels, device, loss))
    if device.type == "cpu" or ":" not in network.name:
        return engines[0]
    # Tests compare GPU and CPU on the layers of built-in models; a user's may have others.
    differs = ""
    for engine in engines:
        if differs:
            engine.description = f"stacked, without compiled kernels, with which the gradient of {differs} is another"
        rounded = torch.bfloat16 if config.precision == "bf16" and engine.kernels is not None else None
        differs = _tried(engine, StackedEngine(network, loss=loss), rounded)
        if not differs:
            return engine
    raise UserError(f"--model {network.name}: the GPU's gradient of {differs} is not the CPU's: use --engine generic")


@contextmanager
def full_float32() -> Iterator[None]:
    """Products in float32 proper, whatever the run's precision."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    try:
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Convolutions by torch's own code: cuDNN prepares every new one for longer than a few images take."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def _tried(engine: StackedEngine, reference: StackedEngine, dtype: torch.dtype | None) -> str:
    """``different_gradient``, first in the ``dtype`` of the run, for which kernels are compiled anyway.

    Where rounding hides what is to be seen, or plain code lacks an operation of that type, float32 decides.
    """
    if dtype is not None:
        with suppress(Exception):
            if not different_gradient(engine, reference, dtype):
                return ""
    return different_gradient(engine, reference)


TRIAL = (2, 4)  # clients, examples
CLOSE, NEGLIGIBLE = 1e-2, 1e-5  # of a parameter's gradient, and of all of them
# Of what rounding makes of a gradient in plain code; and, of the gradient, more than which is not taken for rounding.
ROUNDING, LARGEST = 3.0, 0.5


def different_gradient(engine: StackedEngine, reference: StackedEngine, dtype: torch.dtype = torch.float32) -> str:
    """A parameter whose gradients are not those of ``reference`` in float32, on a small batch; "" if there is none.

    Numbers of a narrower type are rounded by kernels at other places than by plain code, but about as much.
    """
    network = engine.network
    ours, expected = _trial_gradients(engine, dtype, dtype), _trial_gradients(reference, torch.float32, dtype)
    noise = torch.zeros_like(expected)
    if dtype != torch.float32:
        plain = StackedEngine(network, None, engine.side_stream.device, engine.loss)
        with without_cudnn():
            noise = _trial_gradients(plain, dtype, dtype) - expected
    live = [[entry.live(of).norm() for of in (ours - expected, expected, noise)] for entry in network.layout.entries]
    error, size, rounding = torch.tensor(live).T
    negligible = NEGLIGIBLE * expected.norm()
    usual = (rounding / (size + negligible)).nanmedian()  # as a gradient of few numbers may by chance be rounded little
    largest = LARGEST * size + CLOSE * expected.norm()
    allowed = (ROUNDING * torch.maximum(rounding, usual.nan_to_num() * size)).minimum(largest)
    different = ~(error <= CLOSE * size + negligible + allowed)
    return next((e.name for e, differs in zip(network.layout.entries, different, strict=True) if differs), "")


def _trial_gradients(engine: StackedEngine, dtype: torch.dtype, rounded_to: torch.dtype) -> Tensor:
    """In float32 on the CPU, of parameters and a small batch that both types have."""
    device, draw = engine.side_stream.device, torch.Generator().manual_seed(0)
    values = torch.stack([perturbed(engine.network, torch.float32, draw) for _ in range(TRIAL[0])])
    inputs = engine.network.form.random(*TRIAL, draw=draw)
    batch = form.each(inputs, lambda value: form.as_stored(form.as_stored(value, rounded_to), dtype).to(device))
    values = values.to(rounded_to).to(device, dtype)
    targets, weight = engine.loss.targets_like(*TRIAL).to(device), torch.full(TRIAL, 1 / TRIAL[1], device=device)
    grads, keys = torch.zeros_like(values), torch.arange(TRIAL[0], device=device)
    arguments = (values, grads, batch, targets, weight, keys)
    with full_float32():
        if engine.kernels is not None:
            from ..gpu.compile_ahead import compile_ahead

            compile_ahead(partial(engine.gradients, *arguments))
        engine.gradients(*arguments)
    engine.release_buffers()
    return grads.float().cpu()


class StackedEngine(Engine):
    def __init__(
        self,
        network: Network,
        kernels: Kernels | None = None,
        device: torch.device | str = "cpu",
        loss: ClientLoss = CROSS_ENTROPY,
    ):
        assert network.forward is not None
        self.loss = loss
        self.network, self.forward, self.kernels = network, network.forward, kernels
        self.description = "stacked" if kernels is None else "stacked, compiled kernels"
        self.side_stream = SideStream(device)
        self.tables = vocabulary.PaddedTables()
        self.unused = [e for e in network.layout.entries if e.name not in network.forward.used]
        self._constants: dict[torch.dtype, dict[str, Tensor]] = {}
        self._stacks: dict[tuple[int, int, int], Stack] = {}

    def gradients(
        self, values: Tensor, grads: Tensor, inputs: Stored, targets: Tensor, weight: Tensor, keys: Tensor | None
    ) -> Tensor:
        key = (values.data_ptr(), grads.data_ptr(), len(values))
        if key not in self._stacks:
            self._stacks[key] = self._stack(values, grads)
        stack = self._stacks[key]
        self.side_stream.forget()
        for unused in self.unused:
            unused.live(grads).zero_()
        stack.training = keys is not None
        stack.draws = None
        if keys is not None and self.network.draws:
            stack.draws = Draws(keys, stacked=True, dropout=self.kernels.dropout if self.kernels else None)
        program = self.forward.program(stack)
        tokens = None if program.head is None else self.loss.token_weights(targets, weight)
        with torch.enable_grad():
            if tokens is not None:
                layer = program.before_head(stack, inputs)
                losses = vocabulary.backward(*layer, targets, tokens, self.kernels, self.tables)
                self.side_stream.join()
                return losses
            outputs = self.forward(stack, inputs)
            if self.kernels is None or not isinstance(self.loss, CrossEntropy):
                losses = self.loss.backward(outputs, targets, weight)
            else:
                losses, gradient = self.kernels.cross_entropy(outputs.detach(), targets, weight)
                autograd.backward([outputs], [gradient])
        self.side_stream.join()
        return losses.detach()

    def activation_bytes(self, examples: int, dtype: torch.dtype) -> int:
        on_gpu = self.side_stream.device.type == "cuda"
        return self.network.activation_bytes(examples, dtype, on_gpu) if examples else 0

    def release_buffers(self) -> None:
        self._stacks.clear()

    @torch.no_grad()
    def outputs(self, x: Tensor, inputs: Stored, dtype: torch.dtype | None = None) -> Tensor:
        live = x[: self.network.layout.live].to(dtype or x.dtype)
        one_client = form.each(inputs, lambda value: value.unsqueeze(0))
        return self.forward(self._stack(live.unsqueeze(0), None), one_client)[0]

    def _stack(self, values: Tensor, grads: Tensor | None) -> Stack:
        if values.dtype not in self._constants:  # kept, as a captured graph must not copy them from the host
            self._constants[values.dtype] = self.network.stacked_constants(values.dtype, values.device)
        constants = self._constants[values.dtype]
        return Stack(self.network.layout, values, grads, self.kernels, self.side_stream, constants)


# On a CPU, vmap pays for at least this many clients, and up to this many multiply-adds in a client's forward pass.
VMAP_CLIENTS, VMAP_WORK = 4, 4_000_000


class GenericEngine(Engine):
    """Any module: all clients at once by vmap, or one after another by ordinary autograd.

    One after another is how clients train where vmap does not take the module and, on a CPU, where it does not pay.
    """

    def __init__(
        self,
        network: Network,
        device: torch.device | str = "cpu",
        computed_in: torch.dtype = torch.float32,
        loss: ClientLoss = CROSS_ENTROPY,
    ):
        """Tried with numbers of the type ``computed_in``, as a run has them."""
        self.network, self.device, self.loss = network, torch.device(device), loss
        network.module.to(device)
        for name, value in tensors(network.module).items():  # on a GPU, once for the module and the constants
            if name in network.constants and value.dtype == network.constants[name].dtype:
                network.constants[name] = value.detach()
        self.tied = tied(network.module)
        self.constants: dict[torch.dtype, dict[str, Tensor]] = {}
        self._rows: dict[tuple[int, int, int], list[tuple[dict[str, Tensor], list[Tensor]]]] = {}
        self.draws = False  # whether layers draw random numbers in training
        self.capturable = self.device.type == "cuda" or network.work <= VMAP_WORK
        why = f": {network.untraceable_because}" if network.untraceable_because else ""
        how = "functional torch" if self.capturable else "one client after another"
        self.description = f"generic, {how}{why}"
        try:
            self._try(computed_in)
        except Exception as error:
            self.capturable = False
            with users_code(f"--model {network.name}", "a model that autograd can differentiate"):
                self._try(computed_in)
            self.description = f"generic, one client after another: {network.untraceable_because or first_line(error)}"

    def _try(self, dtype: torch.dtype) -> None:
        """A step of two clients."""
        values = self.network.initial(dtype).to(self.device).expand(2, -1).clone()
        draw = torch.Generator().manual_seed(0)
        drawn = self.network.form.random(2, 2, draw=draw)
        inputs = form.each(drawn, lambda value: form.as_stored(value, dtype).to(self.device))
        targets = self.loss.targets_like(2, 2).to(self.device)
        weight, keys = torch.ones(2, 2, dtype=dtype, device=self.device), torch.arange(2, device=self.device)

        gradients = self._at_once if self.capturable else self._one_by_one
        with Draws(keys if self.capturable else keys[:1], stacked=self.capturable) as in_training:
            gradients(values, torch.zeros_like(values), inputs, targets, weight, keys)
        self._rows.clear()
        self.draws = in_training.count > 0

    def _set_mode(self, training: bool) -> None:
        """As users expect of their module: Dropout acts in training, and not in evaluation."""
        if self.network.module.training != training:
            self.network.module.train(training)

    def _values(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of all tensors of the module."""
        return {**self._constants(next(iter(parameters.values())).dtype), **parameters}

    def _forward(self, parameters: dict[str, Tensor], inputs: Stored) -> Tensor:
        return outputs_with(self.network.module, self._values(parameters), self.tied, self.network.form, inputs)

    def _holding(self, parameters: dict[str, Tensor], action: Callable[[], Any]) -> Any:
        """What a forward and a backward pass give with these parameters in the module until both have ended."""
        return while_holding(self.network.module, self._values(parameters), self.tied, action)

    def _constants(self, dtype: torch.dtype) -> dict[str, Tensor]:
        if dtype not in self.constants:
            self.constants[dtype] = {
                name: value.to(self.device, dtype if value.is_floating_point() else value.dtype)
                for name, value in self.network.constants.items()
            }
        return self.constants[dtype]

    def _loss(self, parameters: dict[str, Tensor], inputs: Stored, targets: Tensor, weight: Tensor) -> Tensor:
        """Of one client."""
        outputs = self._forward(parameters, inputs)
        return self.loss(outputs.unsqueeze(0), targets.unsqueeze(0), weight.unsqueeze(0))[0]

    def gradients(
        self, values: Tensor, grads: Tensor, inputs: Stored, targets: Tensor, weight: Tensor, keys: Tensor | None
    ) -> Tensor:
        pays = self.device.type == "cuda" or (
            len(values) >= VMAP_CLIENTS and weight.shape[1] * self.network.work <= VMAP_WORK
        )
        gradients = self._at_once if self.capturable and pays else self._one_by_one
        with self._unchanged(values):
            return gradients(values, grads, inputs, targets, weight, keys)

    @contextmanager
    def _unchanged(self, values: Tensor) -> Iterator[None]:
        """Refuse a model that writes to its parameters: the dry run tries some values of them, and a run has others."""
        before = values._version
        yield
        if values._version != before:
            raise UserError(
                f"--model {self.network.name} changes its parameters in its forward pass: a run's parameters change by "
                "its method alone"
            )

    def _draws(self, keys: Tensor | None, stacked: bool) -> AbstractContextManager[object]:
        return Draws(keys, stacked) if self.draws and keys is not None else nullcontext()

    def _at_once(
        self, values: Tensor, grads: Tensor, inputs: Stored, targets: Tensor, weight: Tensor, keys: Tensor | None
    ) -> Tensor:
        self._set_mode(training=keys is not None)
        self._constants(values.dtype)  # outside of vmap, whose tensors are no longer valid behind it
        layout = self.network.layout

        def of_client(parameters: dict[str, Tensor], *batch: Any) -> Any:
            return self._holding(parameters, lambda: grad_and_value(self._loss)(parameters, *batch))

        with self._draws(keys, stacked=True):
            of_clients = vmap(of_client, randomness="different")
            computed, losses = of_clients(layout.views(values), inputs, targets, weight)
        for name, target in layout.views(grads).items():
            target.copy_(computed[name])
        return losses

    @torch.no_grad()  # but for the forward pass; materialised gradients of unused parameters may require gradients
    def _one_by_one(
        self, values: Tensor, grads: Tensor, inputs: Stored, targets: Tensor, weight: Tensor, keys: Tensor | None
    ) -> Tensor:
        self._set_mode(training=keys is not None)
        losses = []
        each_key: Sequence[Tensor | None] = [None] * len(values) if keys is None else keys.split(1)
        clients = zip(self._leaves(values, grads), targets, weight, each_key, strict=True)
        for client, ((parameters, places), client_targets, client_weight, key) in enumerate(clients):
            client_inputs = form.each(inputs, lambda value, row=client: value[row])
            leaves, batch = tuple(parameters.values()), (client_inputs, client_targets, client_weight)

            def passes(own: dict[str, Tensor] = parameters, of: Any = leaves, batch: Any = batch) -> Any:
                loss = self._loss(own, *batch)
                return loss, torch.autograd.grad(loss, of, allow_unused=True, materialize_grads=True)

            with torch.enable_grad(), self._draws(key, stacked=False):
                loss, computed = self._holding(parameters, passes)
            torch._foreach_copy_(places, [*map(dense, computed)])
            losses.append(loss.detach())
        return torch.stack(losses)

    def _leaves(self, values: Tensor, grads: Tensor) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
        """Every client's parameters, as leaves that share the memory of ``values``, and where their gradients go."""
        key = (values.data_ptr(), grads.data_ptr(), len(values))
        if key not in self._rows:
            views = self.network.layout.views
            self._rows[key] = [
                ({n: v.detach().requires_grad_() for n, v in views(x).items()}, list(views(g).values()))
                for x, g in zip(values, grads, strict=True)
            ]
        return self._rows[key]

    def release_buffers(self) -> None:
        self._rows.clear()

    def activation_bytes(self, examples: int, dtype: torch.dtype) -> int:
        """Tried on a GPU, as a user's own layers are unknown; 0 on a CPU."""
        device = self.device
        if device.type != "cuda" or not examples:
            return 0
        values, grads = (torch.zeros(1, self.network.layout.size, dtype=dtype, device=device) for _ in range(2))
        batch = self.network.form.zeros(1, examples, dtype=dtype, device=device)
        targets = self.loss.targets_like(1, examples).to(device)
        weight, keys = (
            torch.ones(1, examples, dtype=dtype, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self.gradients(values, grads, batch, targets, weight, keys)
        self.release_buffers()
        return torch.cuda.max_memory_allocated(device) - before + form.nbytes(batch)

    @torch.no_grad()
    def outputs(self, x: Tensor, inputs: Stored, dtype: torch.dtype | None = None) -> Tensor:
        self._set_mode(training=False)
        values = x.to(dtype or x.dtype)
        with self._unchanged(values):
            return self._forward(self.network.layout.views(values), inputs)
