"""Layers of C models at once, channels-last: activations are [C, N, rows, columns, channels].

A convolution is columns times weights in one batched product, so C different models cost one launch. A
layer writes its weight gradient straight into the flat gradient ``[C, d]`` (nothing is concatenated
afterwards) and hands only the activation gradient to autograd. The plain code here runs anywhere and is
the specification of the GPU kernels in ``gpu/layer_kernels.py``, which replace single steps of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gpu.side_stream import SideStream
from .columns import Window, col2im, im2col
from .layout import Layout


class LayerSteps(Protocol):
    """The steps of a layer that kernels may replace; ``gpu/layer_kernels.py`` is one of these, ``_Plain`` another."""

    def im2col(self, x: Tensor, window: Window, width: int) -> Tensor: ...

    def col2im(self, cols: Tensor, window: Window, shape: torch.Size) -> Tensor: ...

    def group_norm(
        self, x: Tensor, gamma: Tensor, beta: Tensor, groups: int, residual: Tensor | None, relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def group_norm_backward(
        self, dout: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, out: Tensor | None, groups: int,
        has_residual: bool, gamma_grad: Tensor, beta_grad: Tensor, side_stream: SideStream,
    ) -> tuple[Tensor, Tensor | None]: ...  # fmt: skip


class Kernels(LayerSteps, Protocol):
    """Compiled kernels: the steps above, and two whole operations."""

    def max_pool(self, x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor: ...

    def gather(
        self, images: Tensor, index: Tensor, flip: Tensor, dy: Tensor, dx: Tensor, mean: Tensor, std: Tensor,
        dtype: torch.dtype,
    ) -> Tensor: ...  # fmt: skip


class Stack:
    """C models' parameters and where their gradients go: ``value[name]``, ``grad[name]``, each [C, ...].

    Gradients of parameters are computed on the side stream: only those of activations hold up the next layer.
    """

    def __init__(
        self,
        layout: Layout,
        values: Tensor,
        grads: Tensor | None = None,
        kernels: Kernels | None = None,
        side_stream: SideStream | None = None,
    ):
        self.value = layout.views(values)
        self.grad: dict[str, Tensor | None] = dict.fromkeys(self.value)
        if grads is not None:
            self.grad.update(layout.views(grads))
        self.kernels = kernels
        self.steps: LayerSteps = kernels or _Plain()
        self.side_stream = side_stream or SideStream(values.device)
        self.windows: dict[str, Window] = {}
        # Ties the first layer, whose input needs no gradient, into the backward pass.
        self.anchor = torch.zeros((), dtype=values.dtype, device=values.device, requires_grad=grads is not None)


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


# On a CPU, columns of more bytes per client than this cost more than the library's convolution, client by client.
LARGE = 1 << 21


def use_library(x: Tensor, window: Window) -> bool:
    """Whether the library's convolution, called for one client after another, is faster than columns."""
    if window.dead or x.dtype == torch.float64:
        return False
    if x.is_cuda:
        # For one model on many images, without a gradient that would need the columns again; and on tensor cores only:
        # in full float32 the library's channels-last convolution is far slower than columns.
        narrow = x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32
        return narrow and len(x) == 1 and not torch.is_grad_enabled() and window.kernel > 1 and x.shape[-1] % 8 == 0
    rows = x.shape[1] * window.out[0] * window.out[1]
    return x.dtype == torch.float32 and rows * window.kernel**2 * x.shape[-1] * x.element_size() > LARGE


def torch_kernel(weight: Tensor, window: Window, channels: int) -> Tensor:
    """Stored weights [rows, out] as torch has them, [out, in, k, k]; a view."""
    k = window.kernel
    return weight[: k * k * channels].view(k, k, channels, -1).permute(3, 2, 0, 1)


class _LibraryConvolution(torch.autograd.Function):
    """A convolution by torch's own, for every client in turn."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, grad: Tensor | None, bias: Tensor | None,
        bias_grad: Tensor | None, window: Window, p: Stack,
    ) -> Tensor:  # fmt: skip
        def of(c: int) -> Tensor:
            kernel = torch_kernel(weight[c], window, x.shape[-1])
            b = None if bias is None else bias[c]
            return F.conv2d(x[c].permute(0, 3, 1, 2), kernel, b, window.stride, window.padding).permute(0, 2, 3, 1)

        ctx.save_for_backward(x, weight)
        ctx.window, ctx.grads = window, (grad, bias_grad)
        if len(x) == 1:
            return of(0).unsqueeze(0)
        out = x.new_empty(*x.shape[:2], *window.out, weight.shape[-1])
        for c in range(len(x)):
            out[c] = of(c)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (grad, bias_grad), window = ctx.saved_tensors, ctx.grads, ctx.window
        wanted = (ctx.needs_input_grad[0], True, bias_grad is not None)
        steps = ([window.stride] * 2, [window.padding] * 2, [1, 1], False, [0, 0], 1)
        dx = torch.empty_like(x) if wanted[0] else None
        for c in range(len(x)):
            image, d = x[c].permute(0, 3, 1, 2), dout[c].permute(0, 3, 1, 2)
            kernel = torch_kernel(weight[c], window, x.shape[-1])
            di, dk, db = torch.ops.aten.convolution_backward(d, image, kernel, [len(kernel)], *steps, wanted)
            torch_kernel(grad[c], window, x.shape[-1]).copy_(dk)
            if dx is not None:
                dx[c] = di.permute(0, 2, 3, 1)
            if bias_grad is not None:
                bias_grad[c] = db
        return dx, None, None, None, None, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, grad: Tensor | None, bias: Tensor | None,
        bias_grad: Tensor | None, window: Window, p: Stack,
    ) -> Tensor:  # fmt: skip
        cols = p.steps.im2col(x, window, weight.shape[1])
        out = torch.bmm(cols, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), cols, weight)
        ctx.save_for_backward(cols, weight)
        ctx.window, ctx.shape, ctx.p, ctx.grads = window, x.shape, p, (grad, bias_grad)
        return out.view(*x.shape[:2], *window.out, out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cols, weight = ctx.saved_tensors
        grad, bias_grad = ctx.grads
        dout = dout.reshape(dout.shape[0], -1, dout.shape[-1])

        def of_parameters() -> None:
            product_into(grad, cols, dout)
            if bias_grad is not None:
                torch.sum(dout, 1, out=bias_grad)

        ctx.p.side_stream.submit(of_parameters, cols, dout)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = ctx.p.steps.col2im(torch.bmm(dout, weight.mT), ctx.window, ctx.shape)
        return dx, None, None, None, None, None, None, None


class _GroupNorm(torch.autograd.Function):
    """GroupNorm, then the residual if there is one, then ReLU if asked."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, gamma_grad: Tensor | None, beta: Tensor, beta_grad: Tensor | None,
        groups: int, residual: Tensor | None, relu: bool, p: Stack,
    ) -> Tensor:  # fmt: skip
        out, mean, rstd = p.steps.group_norm(x, gamma, beta, groups, residual, relu)
        ctx.save_for_backward(x, gamma, mean, rstd, out if relu else None)
        ctx.groups, ctx.p, ctx.has_residual, ctx.grads = groups, p, residual is not None, (gamma_grad, beta_grad)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, rstd, out = ctx.saved_tensors
        dx, dresidual = ctx.p.steps.group_norm_backward(
            dout.contiguous(), x, gamma, mean, rstd, out, ctx.groups, ctx.has_residual, *ctx.grads, ctx.p.side_stream
        )
        return dx, None, None, None, None, None, dresidual, None, None


def group_norm(
    x: Tensor, gamma: Tensor, beta: Tensor, groups: int, residual: Tensor | None, relu: bool, eps: float = 1e-5
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
    if relu:
        out = out.relu_()
    return out.to(x.dtype), mean, rstd


def group_norm_backward(
    dout: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, out: Tensor | None, groups: int,
    has_residual: bool, gamma_grad: Tensor, beta_grad: Tensor, side_stream: SideStream,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    count, n, *_, channels = x.shape
    if out is not None:
        dout = dout * (out > 0)
    grouped = (count, n, -1, groups, channels // groups)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dy = dout.reshape(grouped).to(wide)
    normal = (x.reshape(grouped).to(wide) - mean) * rstd

    def of_parameters() -> None:
        beta_grad.copy_(dy.sum((1, 2)).reshape(count, channels))
        gamma_grad.copy_((dy * normal).sum((1, 2)).reshape(count, channels))

    side_stream.submit(of_parameters, dy, normal)
    dnormal = dy * gamma.reshape(count, 1, 1, groups, -1)
    dx = rstd * (dnormal - dnormal.mean((2, 4), keepdim=True) - normal * (dnormal * normal).mean((2, 4), keepdim=True))
    return dx.reshape(x.shape).to(x.dtype), dout if has_residual else None


class _Plain:
    """The steps in plain torch."""

    im2col = staticmethod(im2col)
    col2im = staticmethod(col2im)
    group_norm = staticmethod(group_norm)
    group_norm_backward = staticmethod(group_norm_backward)


def conv(p: Stack, name: str, x: Tensor, kernel: int, stride: int = 1, padding: int = 0) -> Tensor:
    window = Window(x.shape[2], x.shape[3], kernel, stride, padding)
    weight, bias = f"{name}.weight", f"{name}.bias"
    p.windows[weight] = window
    layer = _LibraryConvolution if use_library(x, window) else _Convolution
    return layer.apply(x, p.anchor, p.value[weight], p.grad[weight], p.value.get(bias), p.grad.get(bias), window, p)


def linear(p: Stack, name: str, x: Tensor) -> Tensor:
    """[C, N, in] -> [C, N, out]; a map is flattened first. A product of 1x1 columns."""
    flat = x.reshape(*x.shape[:2], 1, 1, -1)
    return conv(p, name, flat, 1).flatten(2)


def norm(p: Stack, name: str, x: Tensor, groups: int, residual: Tensor | None = None, relu: bool = True) -> Tensor:
    weight, bias = f"{name}.weight", f"{name}.bias"
    return _GroupNorm.apply(x, p.value[weight], p.grad[weight], p.value[bias], p.grad[bias], groups, residual, relu, p)


def max_pool(p: Stack, x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor:
    if p.kernels is not None:
        return p.kernels.max_pool(x, kernel, stride, padding)
    images = x.flatten(0, 1).permute(0, 3, 1, 2)
    pooled = F.max_pool2d(images, kernel, stride, padding).permute(0, 2, 3, 1)
    return pooled.unflatten(0, x.shape[:2])
