"""Convolutions by torch's own, for one client after another, where that is faster than columns of all at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .columns import Window

Pool: TypeAlias = tuple[int, int, int]  # kernel, stride and padding, the same for rows and columns

# On a CPU, columns of more bytes per client than this cost more than the library's convolution, client by client.
LARGE = 1 << 21


def use_library(x: Tensor, window: Window, groups: int = 1) -> bool:
    """Whether the library's convolution, called for one client after another, is faster than columns."""
    if not window.even:
        return True
    if groups > 1 and not x.is_cuda:
        return True
    if window.dead or x.dtype == torch.float64:
        return False
    if x.is_cuda:
        # For one model on many images, without a gradient that would need the columns again; and on tensor cores only:
        # in full float32 the library's channels-last convolution is far slower than columns.
        narrow = x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32
        alone = len(x) == 1 and not torch.is_grad_enabled()
        return narrow and alone and window.kernel != (1, 1) and x.shape[-1] % 8 == 0
    taps = window.kernel[0] * window.kernel[1]
    rows = x.shape[1] * window.out[0] * window.out[1]
    return x.dtype == torch.float32 and rows * taps * x.shape[-1] * x.element_size() > LARGE


def torch_kernel(weight: Tensor, window: Window, channels: int) -> Tensor:
    """Stored weights [rows, out] or [groups, rows, out] as torch has them, [groups, out, in, rows, columns]; a view."""
    height, width = window.kernel
    grouped = weight if weight.dim() == 3 else weight.unsqueeze(0)
    used = grouped[:, : height * width * channels]
    return used.view(len(used), height, width, channels, -1).permute(0, 4, 3, 1, 2)


threshold_backward = torch.ops.aten.threshold_backward.default  # the gradient of ReLU, from its output
_max_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default


class _Library:
    """A convolution by torch's own, of one client after another."""

    def __init__(self, x: Tensor, weight: Tensor, window: Window, groups: int):
        self.x, self.weight, self.window, self.groups = x, weight, window, groups

    def _kernel(self, c: int) -> Tensor:
        return torch_kernel(self.weight[c], self.window, self.x.shape[-1] // self.groups).flatten(0, 1)

    def outputs(self, c: int, bias: Tensor | None) -> Tensor:
        """[N, channels, rows, columns], channels last in memory."""
        window, b = self.window, None if bias is None else bias[c]
        steps = (window.stride, window.padding, window.dilation, self.groups)
        return F.conv2d(self.x[c].permute(0, 3, 1, 2), self._kernel(c), b, *steps)

    def gradients(
        self, c: int, dout: Tensor, needs_input: bool, grad: Tensor | None, bias_grad: Tensor | None
    ) -> Tensor | None:
        """Those of the parameters into place; returns that of the inputs, [N, channels, rows, columns]."""
        window, kernel = self.window, self._kernel(c)
        steps = (window.stride, window.padding, window.dilation, False, [0, 0], self.groups)
        wanted = (needs_input, grad is not None, bias_grad is not None)
        image = self.x[c].permute(0, 3, 1, 2)
        di, dk, db = torch.ops.aten.convolution_backward(dout, image, kernel, [len(kernel)], *steps, wanted)
        if grad is not None:
            target = torch_kernel(grad[c], window, self.x.shape[-1] // self.groups)
            target.copy_(dk.view(target.shape))
        if bias_grad is not None:
            bias_grad[c] = db
        return di if needs_input else None


def _clients_maps(maps: Iterable[Tensor], count: int) -> Tensor:
    """[C, N, rows, columns, channels] from each client's [N, channels, rows, columns], one after another."""
    images = (each.permute(0, 2, 3, 1) for each in maps)
    first = next(images)
    if count == 1:
        return first.unsqueeze(0)
    out = first.new_empty(count, *first.shape)
    out[0] = first
    for c, image in enumerate(images, 1):
        out[c] = image
    return out


class LibraryConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, grad: Tensor | None, bias: Tensor | None,
        bias_grad: Tensor | None, window: Window, groups: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.about, ctx.grads = (window, groups), (grad, bias_grad)
        library = _Library(x, weight, window, groups)
        return _clients_maps((library.outputs(c, bias) for c in range(len(x))), len(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        library, needs_input = _Library(*ctx.saved_tensors, *ctx.about), ctx.needs_input_grad[0]
        parts = (library.gradients(c, d.permute(0, 3, 1, 2), needs_input, *ctx.grads) for c, d in enumerate(dout))
        return _input_gradient(parts, len(dout), needs_input), *(None,) * 7


def _input_gradient(parts: Iterable[Tensor | None], count: int, needed: bool) -> Tensor | None:
    """Of all clients, from what is computed for each; None where it is not needed."""
    if needed:
        return _clients_maps((part for part in parts if part is not None), count)
    for _ in parts:
        pass
    return None


class PooledLibraryConvolution(torch.autograd.Function):
    """A convolution by torch's own, then max-pooling, then ReLU if asked, for one client after another.

    ReLU keeps the order of numbers, so that it may act on the largest alone: the bits are the same. No whole map is
    copied.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, grad: Tensor | None, bias: Tensor | None,
        bias_grad: Tensor | None, window: Window, groups: int, pool: Pool, rectify: bool,
    ) -> Tensor:  # fmt: skip
        library, maps, places = _Library(x, weight, window, groups), list[Tensor](), list[Tensor]()

        kernel, stride, padding = ((side, side) for side in pool)

        def pooled(c: int) -> Tensor:
            whole = library.outputs(c, bias)
            largest, which = F.max_pool2d_with_indices(whole, kernel, stride, padding)
            maps.append(whole)
            places.append(which)
            return largest.relu_() if rectify else largest

        out = _clients_maps((pooled(c) for c in range(len(x))), len(x))
        ctx.save_for_backward(x, weight, out if rectify else None, *maps, *places)
        ctx.about, ctx.pool, ctx.grads = (window, groups), pool, (grad, bias_grad)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out, *each = ctx.saved_tensors
        library, needs_input = _Library(x, weight, *ctx.about), ctx.needs_input_grad[0]
        kernel, stride, padding = ((side, side) for side in ctx.pool)

        def gradient(c: int) -> Tensor | None:
            d = dout[c] if out is None else threshold_backward(dout[c], out[c], 0)
            whole, which = each[c], each[len(x) + c]
            d = d.permute(0, 3, 1, 2)
            whole_gradient = _max_pool_backward(d, whole, kernel, stride, padding, (1, 1), False, which)
            return library.gradients(c, whole_gradient, needs_input, *ctx.grads)

        return _input_gradient((gradient(c) for c in range(len(x))), len(x), needs_input), *(None,) * 9


class RectifiedPool(torch.autograd.Function):
    """Max-pooling, then ReLU, of [C, N, rows, columns, channels] on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        images = x.flatten(0, 1).permute(0, 3, 1, 2)
        largest, which = F.max_pool2d_with_indices(images, (kernel, kernel), (stride, stride), (padding, padding))
        out = largest.relu_().permute(0, 2, 3, 1)
        ctx.save_for_backward(images, which, out)
        ctx.pool, ctx.clients = ((kernel, kernel), (stride, stride), (padding, padding), (1, 1), False), x.shape[:2]
        return out.view(*x.shape[:2], *out.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        images, which, out = ctx.saved_tensors
        d = threshold_backward(dout.reshape(out.shape), out, 0).permute(0, 3, 1, 2)
        dx = _max_pool_backward(d, images, *ctx.pool, which)
        return dx.permute(0, 2, 3, 1).unflatten(0, ctx.clients), None, None, None
