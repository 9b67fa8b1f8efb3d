"""Layers of C models at once, channels-last: activations are [C, N, rows, columns, channels].

A convolution is columns times weights in one batched product, so C different models cost one launch. A
layer writes its weight gradient straight into the flat gradient ``[C, d]`` (nothing is concatenated
afterwards) and hands only the activation gradient to autograd. Kernels may replace its single steps
(``layer_steps.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..gpu.side_stream import SideStream
from .columns import Columns, Window
from .library_convolution import (
    LibraryConvolution,
    Pool,
    PooledLibraryConvolution,
    RectifiedPool,
    threshold_backward,
    use_library,
)
from .stack import Kernels, Stack


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
            out = _models_as_groups(p.steps.product(cols, weight), groups)
            out = out if bias is None else out + bias.unsqueeze(1)
        elif bias is None or fused is None:
            out = p.steps.product(cols, weight, bias=bias)
        else:
            before = p.steps.product(cols, weight)
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
                ctx.p.steps.product(cols.mT, each, target)
                if groups > 1:
                    grad.copy_(target.view(grad.shape))
            if bias_grad is not None:
                ctx.p.steps.column_sums(bias_grad, rows)

        if grad is not None or bias_grad is not None:
            ctx.p.side_stream.submit(of_parameters, cols, each, rows)
        dx = None
        if ctx.needs_input_grad[0]:
            dcols, window = ctx.p.steps.product(each, weight.mT), ctx.window
            dx = _of_rows(dcols, ctx.shape) if window is None else ctx.p.steps.col2im(dcols, window, ctx.shape)
            if groups > 1:
                dx = _models_as_groups(dx, groups)
        return dx, None, None, None, None, None, None, None, None, None


class _MapConvolution(torch.autograd.Function):
    """By kernels that read the map: only the weights' gradient needs columns, which the side stream makes by then."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, grad: Tensor | None, window: Window, p: Stack
    ) -> Tensor:
        assert p.kernels is not None
        x, columns = x.contiguous(), list[Tensor]()
        if grad is not None:
            p.side_stream.submit(lambda: columns.append(p.steps.im2col(x, window, weight.shape[1])), x)
        ctx.save_for_backward(weight)
        ctx.columns, ctx.grad, ctx.window, ctx.p = columns, grad, window, p
        return p.kernels.convolution(x, weight, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), grad, kernels, dout = ctx.saved_tensors, ctx.grad, ctx.p.kernels, dout.contiguous()
        if grad is not None:
            cols, rows = ctx.columns.pop(), dout.flatten(1, -2)
            ctx.p.side_stream.submit(lambda: kernels.product(cols.mT, rows, grad), rows)
        dx = kernels.convolution_input_gradient(dout, weight, ctx.window) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


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


class _NormColumns(torch.autograd.Function):
    """``_GroupNorm`` by kernels that also write, and in the backward pass read, the columns of a convolution behind it.

    Gives the map, for other layers, and the columns.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, gamma: Tensor, gamma_grad: Tensor | None, beta: Tensor,
        beta_grad: Tensor | None, groups: int, eps: float, residual: Tensor | None, activation: str, p: Stack,
        window: Window,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert p.kernels is not None
        out, cols, mean, rstd = p.kernels.norm_columns(x, gamma, beta, groups, residual, activation, eps, window)
        ctx.save_for_backward(x, gamma, mean, rstd, out if activation else None)
        ctx.form, ctx.p, ctx.grads = (groups, activation, residual is not None), p, (gamma_grad, beta_grad)
        ctx.window = window
        ctx.set_materialize_grads(False)
        return out, cols

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dcols: Tensor | None) -> tuple[Tensor | None, ...]:
        kernels, dout = ctx.p.kernels, None if dout is None else dout.contiguous()
        arguments = (*ctx.saved_tensors, *ctx.form, *ctx.grads, ctx.p.side_stream)
        if dcols is None:  # nothing uses the convolution's result
            dx, dresidual = kernels.group_norm_backward(dout, *arguments)
        else:
            dx, dresidual = kernels.norm_columns_backward(dout, dcols.contiguous(), ctx.window, *arguments)
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


class Reader(NamedTuple):
    """A convolution in one group that reads a map: the names of its parameters, and how it moves over the map."""

    weight: str
    bias: str | None
    window: Window


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
    p: Stack, x: Tensor | Columns, weight: str, bias: str | None, window: Window, groups: int = 1, activation: str = ""
) -> Tensor:
    """[C, N, rows, columns, in] -> [C, N, rows', columns', out]."""
    if isinstance(x, Columns):
        images = linear(p, x.columns, weight, bias, activation)
        return images.view(len(images), -1, *window.out, images.shape[-1])
    if len(x) > 1 and {weight, bias} <= p.frozen:  # one product for all clients
        together = conv(p.of_one_client, x.flatten(0, 1).unsqueeze(0), weight, bias, window, groups, activation)
        return together.view(*x.shape[:2], *together.shape[2:])
    parameters = (p.value[weight], p.grad[weight], p.value.get(bias or ""), p.grad.get(bias or ""))
    anchor, after = p.anchor_of(weight, bias), ACTIVATIONS[activation]
    depthwise = groups == x.shape[-1] > 1 and parameters[0].dim() == 3
    if depthwise and p.kernels is not None and window.even:
        return after(_Depthwise.apply(x, anchor, *parameters, window, p.kernels, p.side_stream))
    if depthwise or use_library(x, window, groups):
        return after(LibraryConvolution.apply(x, anchor, *parameters, window, groups))
    if p.kernels is not None and groups == 1 and bias is None and p.kernels.convolves(x, window, parameters[0]):
        return after(_MapConvolution.apply(x, anchor, *parameters[:2], window, p))
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
    reader: Reader | None = None,
) -> Any:  # fmt: skip
    """Of each image and group of channels in x [C, N, rows, columns, channels]; ``twice``: a pair of it.

    ``reader``: a convolution that reads it, or reads the second of the pair; it may be given
    ``Columns``.
    """
    channels = x.shape[-1]
    gamma, beta = p.affine(weight, channels, 1.0), p.affine(bias, channels, 0.0)
    by_kernels = twice and p.kernels is not None
    arguments = (x, p.anchor_of(weight, bias), *gamma, *beta, groups, eps, residual, activation, p)
    if reader is not None and _takes_columns(p, x, groups, reader):
        out, cols = _NormColumns.apply(*arguments, reader.window)
        columns = Columns(cols)
        return (out, columns) if twice else columns
    out = _GroupNorm.apply(*arguments, by_kernels)
    return (out, out) if twice and not by_kernels else out


def _takes_columns(p: Stack, x: Tensor, groups: int, reader: Reader) -> bool:
    """Whether a norm of x gives the convolution behind it columns."""
    if p.kernels is None or reader.weight in p.frozen or use_library(x, reader.window):
        return False
    weight = p.value[reader.weight]
    if reader.bias is None and p.kernels.convolves(x, reader.window, weight):  # as ``conv`` decides
        return False
    return p.kernels.makes_columns(x, groups, reader.window, weight.shape[1])


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
