"""C models' parameters and where their gradients go, as layers find them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gpu.side_stream import SideStream
from ..support.randomness import Draws
from .cells import CellKernels
from .columns import Window
from .layer_steps import BufferedSteps, LayerSteps, PlainSteps
from .layout import Layout


class Kernels(LayerSteps, CellKernels, Protocol):
    """Compiled kernels: the steps above, those of recurrent layers, and whole operations."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor: ...

    def takes_attention(self, q: Tensor, k: Tensor, v: Tensor) -> bool: ...

    def makes_columns(self, x: Tensor, groups: int, window: Window, width: int) -> bool: ...

    def norm_columns(
        self, x: Tensor, gamma: Tensor, beta: Tensor, groups: int, residual: Tensor | None, activation: str, eps: float,
        window: Window,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip

    def norm_columns_backward(
        self, dout: Tensor | None, dcols: Tensor, window: Window, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor,
        out: Tensor | None, groups: int, activation: str, has_residual: bool, gamma_grad: Tensor | None,
        beta_grad: Tensor | None, side_stream: SideStream,
    ) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip

    def spread(self, bias: Tensor, rows: int) -> Tensor: ...

    def added_norm(
        self, x: Tensor, other: Tensor | None, gamma: Tensor | None, beta: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def added_norm_backward(
        self, dout: Tensor, dtotal: Tensor | None, total: Tensor, gamma: Tensor | None, mean: Tensor, rstd: Tensor
    ) -> Tensor: ...

    def row_norm_backward(
        self, dout: Tensor, dtotal: Tensor | None, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor,
        gamma_grad: Tensor | None, beta_grad: Tensor | None, side_stream: SideStream,
    ) -> Tensor: ...  # fmt: skip

    def bias_activation(self, x: Tensor, bias: Tensor, name: str) -> Tensor: ...

    def bias_activation_backward(self, dout: Tensor, x: Tensor, bias: Tensor, name: str) -> tuple[Tensor, Tensor]: ...

    def convolves(self, x: Tensor, window: Window, weight: Tensor) -> bool: ...

    def convolution(self, x: Tensor, weight: Tensor, window: Window) -> Tensor: ...

    def convolution_input_gradient(self, dout: Tensor, weight: Tensor, window: Window) -> Tensor: ...

    def cross_entropy(self, logits: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]: ...

    def token_cross_entropy(
        self, logits: Tensor, bias: Tensor | None, words: int, targets: Tensor, weight: Tensor
    ) -> Tensor: ...

    def depthwise(self, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor: ...

    def depthwise_input_gradient(self, dout: Tensor, weight: Tensor, window: Window, shape: torch.Size) -> Tensor: ...

    def depthwise_weight_gradient(self, grad: Tensor, x: Tensor, dout: Tensor, window: Window) -> None: ...

    def dropout(self, x: Tensor, keys: Tensor, place: int, p: float) -> tuple[Tensor, Tensor]: ...

    def embedding_gradient(self, dout: Tensor, places: Tensor, rows: int, by_frequency: bool) -> Tensor: ...

    def low_rank_product(self, inner: Tensor, b: Tensor, bias: Tensor | None) -> Tensor: ...

    def takes_gradients(self, dout: Tensor, rank: int) -> bool: ...

    def low_rank_gradients(self, dout: Tensor, inner: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]: ...

    def low_rank_activation(self, base: Tensor, inner: Tensor, b: Tensor, name: str) -> Tensor: ...

    def low_rank_activation_backward(
        self, dout: Tensor, dinner: Tensor, a: Tensor, base: Tensor, inner: Tensor, b: Tensor, name: str
    ) -> Tensor: ...

    def max_pool(self, x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor: ...

    def gather(
        self, images: Tensor, index: Tensor, flip: Tensor, dy: Tensor, dx: Tensor, mean: Tensor, std: Tensor,
        dtype: torch.dtype,
    ) -> Tensor: ...  # fmt: skip


class Stack:
    """C models' parameters and where their gradients go: ``value[name]``, ``grad[name]``, each [C, ...].

    Frozen parameters and buffers are values without a gradient. Gradients of parameters are computed on the side
    stream: only those of activations hold up the next layer.
    """

    def __init__(
        self,
        layout: Layout,
        values: Tensor,
        grads: Tensor | None = None,
        kernels: Kernels | None = None,
        side_stream: SideStream | None = None,
        constants: Mapping[str, Tensor] | None = None,
    ):
        self.value = layout.views(values)
        self.grad: dict[str, Tensor | None] = dict.fromkeys(self.value)
        if grads is not None:
            self.grad.update(layout.views(grads))
        self.frozen = {None, *(constants or {})}  # the names of what all clients have in common; None: no parameter
        for name, constant in (constants or {}).items():
            self.value[name], self.grad[name] = constant.expand(len(values), *constant.shape), None
        self.count, self.dtype, self.device = len(values), values.dtype, values.device
        self.on_gpu = values.is_cuda  # where layers compute as a GPU does
        self.training = grads is not None
        self.draws: Draws | None = None  # the random numbers of a step, where layers draw some
        self.kernels = kernels
        repeats = grads is not None and not self.on_gpu
        self.steps: LayerSteps = kernels or (BufferedSteps() if repeats else PlainSteps())
        self.side_stream = side_stream or SideStream(values.device)
        # Ties layers whose input needs no gradient into the backward pass.
        self.anchor = torch.zeros((), dtype=values.dtype, device=values.device, requires_grad=grads is not None)
        self.fixed = self.anchor.detach()

    def rectifies(self, activation: str) -> bool:
        """Whether products apply this activation, ReLU, themselves: on a CPU, a step of its own takes as long."""
        return activation == "relu" and self.kernels is None and not self.on_gpu

    @property
    def of_one_client(self) -> Stack:
        """With the first client's parameters alone, for what all clients have in common."""
        one = copy.copy(self)
        one.value, one.count = {name: self.value[name][:1] for name in self.frozen if name is not None}, 1
        return one

    def anchor_of(self, *names: str | None) -> Tensor:
        """For a layer with these parameters: what needs a gradient if one of them does."""
        return self.anchor if any(self.grad.get(name or "") is not None for name in names) else self.fixed

    def parameter(self, name: str) -> Tensor:
        """[C, ...] for torch's own operations, which give its gradient by autograd."""
        value, grad = self.value[name], self.grad[name]
        return value if grad is None else _Parameter.apply(self.anchor, value, grad)

    def affine(self, name: str | None, channels: int, value: float) -> tuple[Tensor, Tensor | None]:
        """Scale or shift [C, channels] of a norm and its gradient; ``value`` for one that has none."""
        if name is not None:
            grad = self.grad[name]
            return self.value[name].flatten(1), None if grad is None else grad.flatten(1)
        count = len(next(iter(self.value.values())))
        return self.anchor.detach().new_full((1, channels), value).expand(count, channels), None


class _Parameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor | None, ...]:
        ctx.grad.copy_(dvalue)
        return None, None, None
