"""Gradients of C models at once, each on its own batch, written into the flat [C, d] gradient.

``Stacked`` runs the channels-last layers of ``models/ops.py``; ``Generic`` runs any ``nn.Module`` through
``torch.func``. They agree to rounding; the second needs nothing of a model but costs more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from .config import Config
from .models import Network
from .models.beside import Beside
from .models.ops import Stack


def create(network: Network, config: Config, device: torch.device) -> Stacked | Generic:
    """The gradients of ``network`` on ``device``; compiled kernels where they can run (they sum in float32)."""
    if network.forward is None:
        network.module.to(device)
        return Generic(network)
    if device.type == "cuda" and config.compile != "off" and config.precision != "fp64":
        # Here, as the import of Triton takes time that no other run need spend.
        from .models import kernels

        if kernels.available():
            return Stacked(network, kernels, device)
    return Stacked(network, device=device)


def weighted_loss(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Cross-entropy of every client, [C]; ``weight`` is 1/n, and 0 for padding."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)
    return (each * weight).sum(-1)


class Stacked:
    def __init__(self, network: Network, kernels=None, device: torch.device | str = "cpu"):
        self.network, self.kernels, self.beside = network, kernels, Beside(device)
        self._stacks: dict[tuple, Stack] = {}

    def __call__(self, values: Tensor, grads: Tensor, images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        key = (values.data_ptr(), grads.data_ptr(), len(values))
        if key not in self._stacks:
            self._stacks[key] = Stack(self.network.layout, values, grads, self.kernels, self.beside)
        with torch.enable_grad():
            losses = weighted_loss(self.network.forward(self._stacks[key], images), labels, weight)
            losses.sum().backward()
        self.beside.join()
        return losses.detach()

    def activation_bytes(self, image_shape: tuple[int, int, int], images: int, dtype: torch.dtype) -> int:
        """What a client takes beside its state, from the shapes."""
        return self.network.activation_bytes(image_shape, images, dtype) if images else 0

    def forget(self) -> None:
        """Let go of buffers that are no longer used."""
        self._stacks.clear()

    @torch.no_grad()
    def logits(self, x: Tensor, images: Tensor) -> Tensor:
        live = x[: self.network.layout.live]
        stack = Stack(self.network.layout, live.to(images.dtype).unsqueeze(0), None, self.kernels, self.beside)
        return self.network.forward(stack, images.unsqueeze(0))[0]


class Generic:
    def __init__(self, network: Network):
        self.network = network

        def loss(parameters, images, labels, weight):
            return weighted_loss(self._forward(parameters, images), labels, weight)

        self._gradient = vmap(grad_and_value(loss), randomness="different")

    def _forward(self, parameters: dict[str, Tensor], images: Tensor) -> Tensor:
        return functional_call(self.network.module, parameters, (images.permute(0, 3, 1, 2),))

    def __call__(self, values: Tensor, grads: Tensor, images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        found, losses = self._gradient(self.network.layout.views(values), images, labels, weight)
        for name, target in self.network.layout.views(grads).items():
            target.copy_(found[name])
        return losses

    def activation_bytes(self, image_shape: tuple[int, int, int], images: int, dtype: torch.dtype) -> int:
        """What a client takes beside its state: tried on a GPU, as nobody knows a user's own layers; 0 on a CPU."""
        device = next(self.network.module.parameters()).device
        if device.type != "cuda" or not images:
            return 0
        values, grads = (torch.zeros(1, self.network.layout.size, dtype=dtype, device=device) for _ in range(2))
        batch = torch.zeros(1, images, *image_shape, dtype=dtype, device=device)
        labels = torch.zeros(1, images, dtype=torch.int64, device=device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self(values, grads, batch, labels, torch.ones_like(labels, dtype=dtype))
        return torch.cuda.max_memory_allocated(device) - before + batch.nbytes

    def forget(self) -> None:
        """Nothing is held here."""

    @torch.no_grad()
    def logits(self, x: Tensor, images: Tensor) -> Tensor:
        return self._forward(self.network.layout.views(x.to(images.dtype)), images)
