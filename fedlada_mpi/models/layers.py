"""Layers of C models at once, channels-last: activations are [C, N, rows, columns, channels].

A convolution is columns times weights in one batched product, so C different models cost one launch. A
layer writes its weight gradient straight into the flat gradient ``[C, d]`` (nothing is concatenated
afterwards) and hands only the activation gradient to autograd. The plain code here runs anywhere and is
the specification of the GPU kernels in ``gpu/layer_kernels.py``, which replace single steps of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gpu.side_stream import SideStream
from ..support.randomness import Draws
from .cells import CellKernels
from .columns import ColumnBuffers, Window, col2im, im2col
from .layout import Layout
from .library_convolution import (
    LibraryConvolution,
    Pool,
    PooledLibraryConvolution,
    RectifiedPool,
    threshold_backward,
    use_library,
)


class LayerSteps(Protocol):
    """The steps of a layer that kernels may replace; ``gpu/layer_kernels.py`` is one of these, ``_Plain`` another."""

    def im2col(self, x: Tensor, window: Window, width: int) -> Tensor: ...

    def col2im(self, cols: Tensor, window: Window, shape: torch.Size) -> Tensor: ...

    def column_sums(self, target: Tensor, rows: Tensor, times: Tensor | None = None) -> None: ...

    def scale(self, x: Tensor, factor: Tensor) -> Tensor: ...

    def group_norm(
        self, x: Tensor, gamma: Tensor, beta: Tensor, groups: int, residual: Tensor | None, activation: str, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def group_norm_backward(
        self, dout: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, out: Tensor | None, groups: int,
        activation: str, has_residual: bool, gamma_grad: Tensor | None, beta_grad: Tensor | None,
        side_stream: SideStream, dmore: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip


class Kernels(LayerSteps, CellKernels, Protocol):
    """Compiled kernels: the steps above, those of recurrent layers, and whole operations."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor: ...

    def takes_attention(self, q: Tensor, k: Tensor, v: Tensor) -> bool: ...

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

    def cross_entropy(self, logits: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]: ...

    def token_cross_entropy(
        self, logits: Tensor, bias: Tensor | None, words: int, targets: Tensor, weight: Tensor
    ) -> Tensor: ...

    def depthwise(self, x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor: ...

    def depthwise_input_gradient(self, dout: Tensor, weight: Tensor, window: Window, shape: torch.Size) -> Tensor: ...

    def depthwise_weight_gradient(self, grad: Tensor, x: Tensor, dout: Tensor, window: Window) -> None: ...

    def dropout(self, x: Tensor, keys: Tensor, place: int, p: float) -> tuple[Tensor, Tensor]: ...

    def embedding_gradient(self, dout: Tensor, places: Tensor, rows: int, by_frequency: bool) -> Tensor: ...

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
        self.steps: LayerSteps = kernels or (_Buffered() if repeats else _Plain())
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


# A weight gradient sums over all pixels of all images: a long product with few rows and columns. Cut into this
# many products of the same batch, it fills a GPU.
PIECES = 8


def product_into(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target [C, m, n] = a^T @ b with a [C, length, m], b [C, length, n]."""
    count, length, m = a.shape
    n = b.shape[-1]
    tiles = count * -(-m // 64) * -(-n // 64)
    pieces = PIECES if a.is_cuda and tiles < 200 and length % PIECES == 0 and length >= 128 * PIECES else 1
    if pieces > 1:
        a, b = (v.view(count * pieces, length // pieces, v.shape[-1]) for v in (a, b))
        parts = torch.bmm(a.mT, b).view(count, pieces, m, n)
        torch.sum(parts, 1, dtype=target.dtype, out=target)
    else:
        torch.bmm(a.mT, b, out=target)


# On a CPU, maps of up to this many bytes have buffers: of larger ones, the arithmetic takes far longer than the views.
BUFFERED = 1 << 20


def _groups_as_models(x: Tensor, groups: int) -> Tensor:
    """[C, ..., channels] -> [C * groups, ..., channels / groups]: every group as a model of its own."""
    return x.unflatten(-1, (groups, -1)).movedim(-2, 1).flatten(0, 1)


def _models_as_groups(x: Tensor, groups: int) -> Tensor:
    """The inverse of ``_groups_as_models``."""
    return x.unflatten(0, (-1, groups)).movedim(1, -2).flatten(-2)


def _rows(x: Tensor, width: int) -> Tensor:
    """[C, N, ..., in] -> [C, rows, width], zero-padded."""
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    return rows if x.shape[-1] == width else F.pad(rows, (0, width - x.shape[-1]))


def _of_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of ``_rows``."""
    return rows[..., : shape[-1]].reshape(shape)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, grad: Tensor | None, bias: Tensor | None,
        bias_grad: Tensor | None, window: Window | None, groups: int, activation: str, p: Stack,
    ) -> Tensor:  # fmt: skip
        """Without a window, x is [C, N, ..., in]: a linear layer."""
        shape = x.shape
        before = None  # the product, where a kernel adds the bias and applies the activation
        if groups > 1:
            x = _groups_as_models(x, groups)
            weight = weight.flatten(0, 1)
        cols = _rows(x, weight.shape[1]) if window is None else p.steps.im2col(x, window, weight.shape[1])
        fused = p.kernels if activation else None
        ctx.window, ctx.shape, ctx.groups, ctx.p, ctx.grads = window, x.shape, groups, p, (grad, bias_grad)
        if groups > 1:
            out = _models_as_groups(torch.bmm(cols, weight), groups)
            out = out if bias is None else out + bias.unsqueeze(1)
        elif bias is None:
            out = torch.bmm(cols, weight)
        elif fused is None:
            # baddbmm would copy the bias into every row by itself, and slowly on a GPU.
            rows = p.kernels.spread(bias, cols.shape[1]) if p.kernels else None
            out = torch.baddbmm(bias.unsqueeze(1), cols, weight) if rows is None else rows.baddbmm_(cols, weight)
        else:
            before = torch.bmm(cols, weight)
            out = fused.bias_activation(before, bias, activation)
        # Kernels have the other activations; here there is ReLU alone, whose gradient follows from its output.
        rectified = out.relu_() if activation and fused is None else None
        ctx.save_for_backward(cols, weight, before, bias, rectified)
        ctx.activation = activation
        return out.view(*(shape[:-1] if window is None else (*shape[:2], *window.out)), out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cols, weight, before, bias, rectified = ctx.saved_tensors
        (grad, bias_grad), groups = ctx.grads, ctx.groups
        dout = dout.reshape(dout.shape[0], -1, dout.shape[-1])
        if rectified is not None:
            dout = threshold_backward(dout, rectified, 0)
        each = rows = dout  # the bias's gradient is the sum of rows
        if before is not None:
            dout, rows = ctx.p.kernels.bias_activation_backward(dout, before, bias, ctx.activation)
            each = dout
        if groups > 1:
            each = _groups_as_models(dout, groups)

        def of_parameters() -> None:
            if grad is not None:
                target = grad if groups == 1 else torch.empty_like(grad).flatten(0, 1)
                product_into(target, cols, each)
                if groups > 1:
                    grad.copy_(target.view(grad.shape))
            if bias_grad is not None:
                ctx.p.steps.column_sums(bias_grad, rows)

        if grad is not None or bias_grad is not None:
            ctx.p.side_stream.submit(of_parameters, cols, each, rows)
        dx = None
        if ctx.needs_input_grad[0]:
            dcols, window = torch.bmm(each, weight.mT), ctx.window
            dx = _of_rows(dcols, ctx.shape) if window is None else ctx.p.steps.col2im(dcols, window, ctx.shape)
            if groups > 1:
                dx = _models_as_groups(dx, groups)
        return dx, None, None, None, None, None, None, None, None, None


class _Depthwise(torch.autograd.Function):
    """Every channel with a kernel of its own: too little arithmetic for products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, grad: Tensor | None, bias: Tensor | None,
        bias_grad: Tensor | None, window: Window, kernels: Kernels, side_stream: SideStream,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.window, ctx.kernels, ctx.side_stream, ctx.grads = window, kernels, side_stream, (grad, bias_grad)
        return kernels.depthwise(x, weight, bias, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (grad, bias_grad), window = ctx.saved_tensors, ctx.grads, ctx.window
        dout = dout.contiguous()

        def of_parameters() -> None:
            if grad is not None:
                ctx.kernels.depthwise_weight_gradient(grad, x, dout, window)
            if bias_grad is not None:
                ctx.kernels.column_sums(bias_grad, dout.flatten(1, -2))

        if grad is not None or bias_grad is not None:
            ctx.side_stream.submit(of_parameters, x, dout)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ctx.kernels.depthwise_input_gradient(dout, weight, window, x.shape)
        return dx, None, None, None, None, None, None, None, None


class _GroupNorm(torch.autograd.Function):
    """GroupNorm, then the residual if there is one, then one of NORM_ACTIVATIONS if asked.

    ``twice``: two results, the same, for the two layers that use it, whose gradients the kernel then adds.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, gamma: Tensor, gamma_grad: Tensor | None, beta: Tensor,
        beta_grad: Tensor | None, groups: int, eps: float, residual: Tensor | None, activation: str, p: Stack,
        twice: bool,
    ) -> tuple[Tensor, Tensor] | Tensor:  # fmt: skip
        out, mean, rstd = p.steps.group_norm(x, gamma, beta, groups, residual, activation, eps)
        ctx.save_for_backward(x, gamma, mean, rstd, out if activation else None)
        ctx.form, ctx.p, ctx.grads = (groups, activation, residual is not None), p, (gamma_grad, beta_grad)
        return (out, out.view_as(out)) if twice else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dmore: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, gamma, mean, rstd, out = ctx.saved_tensors
        dmore = None if dmore is None else dmore.contiguous()
        dx, dresidual = ctx.p.steps.group_norm_backward(
            dout.contiguous(), x, gamma, mean, rstd, out, *ctx.form, *ctx.grads, ctx.p.side_stream, dmore
        )
        return dx, None, None, None, None, None, None, None, dresidual, None, None, None


class _LayerNorm(torch.autograd.Function):
    """Over the last axis of [C, rows, channels], by torch's own function, which passes over the numbers once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, gamma: Tensor, gamma_grad: Tensor | None, beta: Tensor,
        beta_grad: Tensor | None, eps: float, p: Stack,
    ) -> Tensor:  # fmt: skip
        normal, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        ctx.save_for_backward(x, normal, mean, rstd, gamma)
        ctx.p, ctx.grads = p, (gamma_grad, beta_grad)
        return torch.addcmul(beta.unsqueeze(1), normal, gamma.unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, normal, mean, rstd, gamma = ctx.saved_tensors
        gamma_grad, beta_grad = ctx.grads

        def of_parameters() -> None:
            if gamma_grad is not None:
                ctx.p.steps.column_sums(gamma_grad, dout, normal)
            if beta_grad is not None:
                ctx.p.steps.column_sums(beta_grad, dout)

        ctx.p.side_stream.submit(of_parameters, dout, normal)
        dx = None
        if ctx.needs_input_grad[0]:
            scaled, wanted = dout * gamma.unsqueeze(1), [True, False, False]
            dx, _, _ = torch.ops.aten.native_layer_norm_backward(
                scaled, x, x.shape[-1:], mean, rstd, None, None, wanted
            )
        return dx, None, None, None, None, None, None, None


class _Scale(torch.autograd.Function):
    """Channels, the last axis, times a factor of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, factor: Tensor, grad: Tensor | None, p: Stack) -> Tensor:
        factor = factor.reshape(len(x), -1)
        ctx.save_for_backward(x, factor)
        ctx.grad, ctx.p = grad, p
        return p.steps.scale(x, factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors
        if ctx.grad is not None:
            target = ctx.grad.view(len(x), -1)
            rows, times = (v.reshape(len(x), -1, x.shape[-1]) for v in (dout, x))
            ctx.p.side_stream.submit(lambda: ctx.p.steps.column_sums(target, rows, times), rows, times)
        dx = ctx.p.steps.scale(dout, factor) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None


def column_sums(target: Tensor, rows: Tensor, times: Tensor | None = None) -> None:
    """target [C, n] = the sums over the rows of [C, length, n], or of its products with another such tensor."""
    torch.sum(rows if times is None else rows * times, 1, out=target)


def scale_channels(x: Tensor, factor: Tensor) -> Tensor:
    """x [C, ..., channels] times factor [C, channels]."""
    return x * factor.view(len(x), *(1,) * (x.dim() - 2), -1)


def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, residual: Tensor | None, activation: str, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    count, n, *_, channels = x.shape
    grouped = x.reshape(count, n, -1, groups, channels // groups)
    wide = grouped if x.dtype == torch.float64 else grouped.float()
    variance, mean = torch.var_mean(wide, dim=(2, 4), keepdim=True, correction=0)
    rstd = (variance + eps).rsqrt()
    per_channel = (count, 1, 1, groups, channels // groups)
    out = ((wide - mean) * rstd * gamma.reshape(per_channel) + beta.reshape(per_channel)).reshape(x.shape)
    if residual is not None:
        out = out + residual
    if activation:
        out = out.relu_() if activation == "relu" else out.clamp_(0, 6)
    return out.to(x.dtype), mean, rstd


def group_norm_backward(
    dout: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, out: Tensor | None, groups: int,
    activation: str, has_residual: bool, gamma_grad: Tensor | None, beta_grad: Tensor | None, side_stream: SideStream,
    dmore: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Where the result was used twice, the gradients are ``dout`` and ``dmore``."""
    count, n, *_, channels = x.shape
    dout = dout if dmore is None else dout + dmore
    if out is not None:
        dout = dout * ((out > 0) if activation == "relu" else (out > 0) & (out < 6))
    grouped = (count, n, -1, groups, channels // groups)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dy = dout.reshape(grouped).to(wide)
    normal = (x.reshape(grouped).to(wide) - mean) * rstd

    def of_parameters() -> None:
        if beta_grad is not None:
            beta_grad.copy_(dy.sum((1, 2)).reshape(count, channels))
        if gamma_grad is not None:
            gamma_grad.copy_((dy * normal).sum((1, 2)).reshape(count, channels))

    side_stream.submit(of_parameters, dy, normal)
    dnormal = dy * gamma.reshape(count, 1, 1, groups, -1)
    dx = rstd * (dnormal - dnormal.mean((2, 4), keepdim=True) - normal * (dnormal * normal).mean((2, 4), keepdim=True))
    return dx.reshape(x.shape).to(x.dtype), dout if has_residual else None


class _Plain:
    """The steps in plain torch."""

    im2col = staticmethod(im2col)
    col2im = staticmethod(col2im)
    column_sums = staticmethod(column_sums)
    scale = staticmethod(scale_channels)
    group_norm = staticmethod(group_norm)
    group_norm_backward = staticmethod(group_norm_backward)


class _Buffered(_Plain):
    """The steps on a CPU that come again and again, with buffers for small maps."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[Window, torch.Size], ColumnBuffers] = {}

    def im2col(self, x: Tensor, window: Window, width: int) -> Tensor:
        if window.pointwise or x.nbytes > BUFFERED:
            return im2col(x, window, width)
        return self._of(window, x.shape, x).im2col(x, width)

    def col2im(self, cols: Tensor, window: Window, shape: torch.Size) -> Tensor:
        if window.pointwise or shape.numel() * cols.element_size() > BUFFERED or not cols.is_contiguous():
            return col2im(cols, window, shape)
        return self._of(window, shape, cols).col2im(cols)

    def _of(self, window: Window, shape: torch.Size, like: Tensor) -> ColumnBuffers:
        if (window, shape) not in self.buffers:
            self.buffers[window, shape] = ColumnBuffers(window, shape, like)
        return self.buffers[window, shape]


# Those that kernels compute together with the bias before them.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
# Those whose gradient follows from their output: norms compute them.
NORM_ACTIVATIONS = ("relu", "relu6")


def conv(
    p: Stack, x: Tensor, weight: str, bias: str | None, window: Window, groups: int = 1, activation: str = ""
) -> Tensor:
    """[C, N, rows, columns, in] -> [C, N, rows', columns', out]."""
    if len(x) > 1 and {weight, bias} <= p.frozen:  # one product for all clients
        together = conv(p.of_one_client, x.flatten(0, 1).unsqueeze(0), weight, bias, window, groups, activation)
        return together.view(*x.shape[:2], *together.shape[2:])
    parameters = (p.value[weight], p.grad[weight], p.value.get(bias or ""), p.grad.get(bias or ""))
    anchor, after = p.anchor_of(weight, bias), ACTIVATIONS[activation]
    depthwise = groups == x.shape[-1] > 1 and parameters[0].dim() == 3
    if use_library(x, window, groups) or (depthwise and p.kernels is None):
        return after(LibraryConvolution.apply(x, anchor, *parameters, window, groups))
    if depthwise:
        return after(_Depthwise.apply(x, anchor, *parameters, window, p.kernels, p.side_stream))
    if p.rectifies(activation) or (p.kernels is not None and bias is not None and groups == 1):
        return _Convolution.apply(x, anchor, *parameters, window, groups, activation, p)
    return after(_Convolution.apply(x, anchor, *parameters, window, groups, "", p))


def pooled_conv(
    p: Stack, x: Tensor, weight: str, bias: str | None, window: Window, groups: int, activation: str, pool: Pool
) -> Tensor:
    """A convolution, its activation ("" or ``relu``) and max-pooling; ReLU acts last, unless a kernel adds it."""
    if p.kernels is not None:
        return max_pool(p, conv(p, x, weight, bias, window, groups, activation), *pool)
    if not x.is_cuda and use_library(x, window, groups) and not (len(x) > 1 and {weight, bias} <= p.frozen):
        parameters = (p.value[weight], p.grad[weight], p.value.get(bias or ""), p.grad.get(bias or ""))
        about = (window, groups, pool, bool(activation))
        return PooledLibraryConvolution.apply(x, p.anchor_of(weight, bias), *parameters, *about)
    whole = conv(p, x, weight, bias, window, groups)
    if p.rectifies(activation):
        return RectifiedPool.apply(whole, *pool)
    return ACTIVATIONS[activation](max_pool(p, whole, *pool))


def linear(p: Stack, x: Tensor, weight: str, bias: str | None, activation: str = "") -> Tensor:
    """[C, N, ..., in] -> [C, N, ..., out]: a product of 1x1 columns."""
    pixels = x.reshape(*x.shape[:2], -1, 1, x.shape[-1])
    alone = len(x) == 1 or not {weight, bias} <= p.frozen
    if not p.on_gpu and alone and not use_library(pixels, _of_pixels(pixels.shape[2])):
        # Of a small layer, what turns it into a map and back takes as long as its product.
        parameters = (p.value[weight], p.grad[weight], p.value.get(bias or ""), p.grad.get(bias or ""))
        fused, after = ("relu", "") if p.rectifies(activation) else ("", activation)
        return ACTIVATIONS[after](_Convolution.apply(x, p.anchor_of(weight, bias), *parameters, None, 1, fused, p))
    return conv(p, pixels, weight, bias, _of_pixels(pixels.shape[2]), activation=activation).view(*x.shape[:-1], -1)


@cache
def _of_pixels(count: int) -> Window:
    """A 1x1 kernel on so many pixels."""
    return Window(count, 1, (1, 1))


def norm(
    p: Stack, x: Tensor, weight: str | None, bias: str | None, groups: int, eps: float = 1e-5,
    residual: Tensor | None = None, activation: str = "", twice: bool = False,
) -> Any:  # fmt: skip
    """Of each image and group of channels in x [C, N, rows, columns, channels]; ``twice``: a pair of it."""
    channels = x.shape[-1]
    gamma, beta = p.affine(weight, channels, 1.0), p.affine(bias, channels, 0.0)
    by_kernels = twice and p.kernels is not None
    anchor = p.anchor_of(weight, bias)
    out = _GroupNorm.apply(x, anchor, *gamma, *beta, groups, eps, residual, activation, p, by_kernels)
    return (out, out) if twice and not by_kernels else out


def layer_norm(p: Stack, x: Tensor, weight: str | None, bias: str | None, eps: float) -> Tensor:
    """Over the last axis of x [C, N, ..., channels]: every pixel is an image of its own."""
    if p.kernels is None:
        rows, channels = x.reshape(len(x), -1, x.shape[-1]), x.shape[-1]
        gamma, beta = p.affine(weight, channels, 1.0), p.affine(bias, channels, 0.0)
        return _LayerNorm.apply(rows, p.anchor_of(weight, bias), *gamma, *beta, eps, p).view(x.shape)
    pixels = x.reshape(len(x), -1, 1, 1, x.shape[-1])
    return norm(p, pixels, weight, bias, 1, eps).view(x.shape)


def scale(p: Stack, x: Tensor, factor: str) -> Tensor:
    """x [C, N, ..., channels] times a factor of each channel."""
    return _Scale.apply(x, p.anchor_of(factor), p.value[factor], p.grad[factor], p)


def max_pool(p: Stack, x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor:
    if p.kernels is not None:
        return p.kernels.max_pool(x, kernel, stride, padding)
    return on_images(x, lambda images: F.max_pool2d(images, kernel, stride, padding))


def on_images(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of images [N, channels, rows, columns] on those of all clients, [C, N, rows, columns, channels]."""
    images = x.flatten(0, 1).permute(0, 3, 1, 2)
    return function(images).permute(0, 2, 3, 1).unflatten(0, x.shape[:2])
