"""How much arithmetic a model takes, from its shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class _Products(TorchDispatchMode):
    """Counts the multiply-adds of convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is aten.convolution:
            self.count += out.numel() * args[1][0].numel()
        elif packet in (aten.mm, aten.bmm):
            self.count += out.numel() * args[0].shape[-1]
        elif packet in (aten.addmm, aten.baddbmm):
            self.count += out.numel() * args[1].shape[-1]
        return out


def multiply_adds(module: nn.Module, image_shape: tuple[int, int, int]) -> int:
    """Of a forward pass over one image [rows, columns, channels]."""
    rows, columns, channels = image_shape
    like = next(p for p in module.parameters() if p.is_floating_point())
    image = torch.zeros(1, channels, rows, columns, dtype=like.dtype, device=like.device)
    training = module.training
    with torch.no_grad(), _Products() as products:
        module.eval()(image)
    module.train(training)
    return products.count
