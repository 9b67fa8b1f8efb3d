"""Gradients of C models at once, each on its own batch, written into the flat [C, d] gradient.

``StackedEngine`` runs the channels-last layers of ``models/layers.py``; ``GenericEngine`` runs any ``nn.Module``
through ``torch.func``. They agree to rounding; the second takes any model but costs more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from .config import Config
from .gpu.side_stream import SideStream
from .models import Network
from .models.layers import Kernels, Stack


class Engine(ABC):
    """The gradients and logits of a network, whose parameters are rows of a matrix."""

    network: Network
    kernels: Kernels | None = None  # compiled ones, where they can run

    @abstractmethod
    def gradients(self, values: Tensor, grads: Tensor, images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """The losses [C] of ``values`` [C, d] on the batches, and their gradients into ``grads``."""

    @abstractmethod
    def logits(self, x: Tensor, images: Tensor) -> Tensor:
        """Of one model ``x`` [d] on images [N, H, W, ch]."""

    @abstractmethod
    def activation_bytes(self, image_shape: tuple[int, ...], images: int, dtype: torch.dtype) -> int:
        """What a client with batches of ``images`` takes in addition to its state; 0 where unknown."""

    def release_buffers(self) -> None:  # noqa: B027  (one engine has none)
        """Let go of buffers that are no longer used."""


def create_engine(network: Network, config: Config, device: torch.device) -> Engine:
    """The engine of ``network`` on ``device``; with compiled kernels where they can run (they sum in float32)."""
    if network.forward is None:
        network.module.to(device)
        return GenericEngine(network)
    if device.type == "cuda" and config.compile != "off" and config.precision != "fp64":
        # Here, as importing Triton takes time that no other run need spend.
        from .gpu import layer_kernels

        if layer_kernels.available():
            return StackedEngine(network, layer_kernels, device)
    return StackedEngine(network, device=device)


def weighted_loss(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Cross-entropy of every client, [C]; ``weight`` is 1/n, and 0 for padding."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)
    return (each * weight).sum(-1)


class StackedEngine(Engine):
    def __init__(self, network: Network, kernels: Kernels | None = None, device: torch.device | str = "cpu"):
        assert network.forward is not None
        self.network, self.forward, self.kernels = network, network.forward, kernels
        self.side_stream = SideStream(device)
        self._stacks: dict[tuple[int, int, int], Stack] = {}

    def gradients(self, values: Tensor, grads: Tensor, images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        key = (values.data_ptr(), grads.data_ptr(), len(values))
        if key not in self._stacks:
            self._stacks[key] = Stack(self.network.layout, values, grads, self.kernels, self.side_stream)
        with torch.enable_grad():
            losses = weighted_loss(self.forward(self._stacks[key], images), labels, weight)
            losses.sum().backward()
        self.side_stream.join()
        return losses.detach()

    def activation_bytes(self, image_shape: tuple[int, ...], images: int, dtype: torch.dtype) -> int:
        return self.network.activation_bytes(image_shape, images, dtype) if images else 0

    def release_buffers(self) -> None:
        self._stacks.clear()

    @torch.no_grad()
    def logits(self, x: Tensor, images: Tensor) -> Tensor:
        live = x[: self.network.layout.live]
        stack = Stack(self.network.layout, live.to(images.dtype).unsqueeze(0), None, self.kernels, self.side_stream)
        return self.forward(stack, images.unsqueeze(0))[0]


class GenericEngine(Engine):
    def __init__(self, network: Network):
        self.network = network

        def loss(parameters: dict[str, Tensor], images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
            return weighted_loss(self._forward(parameters, images), labels, weight)

        self._gradient = vmap(grad_and_value(loss), randomness="different")

    def _set_mode(self, training: bool) -> None:
        """As users expect of their module: Dropout acts in training, and not in evaluation."""
        if self.network.module.training != training:
            self.network.module.train(training)

    def _forward(self, parameters: dict[str, Tensor], images: Tensor) -> Tensor:
        return functional_call(self.network.module, parameters, (images.permute(0, 3, 1, 2),))

    def gradients(self, values: Tensor, grads: Tensor, images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        self._set_mode(training=True)
        computed, losses = self._gradient(self.network.layout.views(values), images, labels, weight)
        for name, target in self.network.layout.views(grads).items():
            target.copy_(computed[name])
        return losses

    def activation_bytes(self, image_shape: tuple[int, ...], images: int, dtype: torch.dtype) -> int:
        """Tried on a GPU, as a user's own layers are unknown; 0 on a CPU."""
        device = next(self.network.module.parameters()).device
        if device.type != "cuda" or not images:
            return 0
        values, grads = (torch.zeros(1, self.network.layout.size, dtype=dtype, device=device) for _ in range(2))
        batch = torch.zeros(1, images, *image_shape, dtype=dtype, device=device)
        labels = torch.zeros(1, images, dtype=torch.int64, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self.gradients(values, grads, batch, labels, torch.ones_like(labels, dtype=dtype))
        return torch.cuda.max_memory_allocated(device) - before + batch.nbytes

    @torch.no_grad()
    def logits(self, x: Tensor, images: Tensor) -> Tensor:
        self._set_mode(training=False)
        return self._forward(self.network.layout.views(x.to(images.dtype)), images)
