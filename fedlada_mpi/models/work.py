"""How much arithmetic a model takes, from its shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .form import Form
from .tracing import mode_of

CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
PRODUCTS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm}


class _Products(TorchFunctionMode):
    """Counts the multiply-adds of convolutions and matrix products.

    It sees the calls of torch's functions. A mode that sees what these call would import torch's compiler, which takes
    seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in CONVOLUTIONS:
            self.count += out.numel() * args[1][0].numel()
        elif func in PRODUCTS:
            self.count += out.numel() * args[0].shape[-1]
        elif func is F.scaled_dot_product_attention:  # products with the keys, and with the values
            query, key = args[:2]
            self.count += query.numel() * key.shape[-2] + out.numel() * key.shape[-2]
        return out


def multiply_adds(module: nn.Module, form: Form) -> int:
    """Of a forward pass over one example."""
    like = next(p for p in module.parameters() if p.is_floating_point())
    arguments, named = form.seen(form.zeros(1, dtype=like.dtype, device=like.device))
    with torch.no_grad(), mode_of(module, training=False), _Products() as products:
        module(*arguments, **named)
    return products.count
