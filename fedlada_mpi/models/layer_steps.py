"""The steps of a layer that kernels may replace, and what they are in plain torch.

The plain code runs anywhere and is the specification of the GPU kernels in ``gpu/layer_kernels.py``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..gpu.products import library_product
from ..gpu.side_stream import SideStream
from .columns import ColumnBuffers, Window, col2im, im2col

# On a CPU, maps of up to this many bytes have buffers: of larger ones, the arithmetic takes far longer than the views.
BUFFERED = 1 << 20


class LayerSteps(Protocol):
    """``gpu/layer_kernels.py`` is one of these, ``PlainSteps`` another."""

    def product(self, a: Tensor, b: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor: ...

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


class PlainSteps:
    """The steps in plain torch."""

    product = staticmethod(library_product)
    im2col = staticmethod(im2col)
    col2im = staticmethod(col2im)
    column_sums = staticmethod(column_sums)
    scale = staticmethod(scale_channels)
    group_norm = staticmethod(group_norm)
    group_norm_backward = staticmethod(group_norm_backward)


class BufferedSteps(PlainSteps):
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
