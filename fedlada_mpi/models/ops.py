"""Layers of C models at once, channels-last: activations are [C, N, rows, columns, channels].

A convolution is columns times weights in one batched product, so C different models cost one launch. A
layer writes its weight gradient straight into the flat gradient ``[C, d]`` (nothing is concatenated
afterwards) and hands only the activation gradient to autograd. The plain code here runs anywhere and is
the specification of the GPU kernels in ``kernels.py``, which replace single steps of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .beside import Beside
from .layout import Layout


class Stack:
    """C models' parameters and where their gradients go: ``value[name]``, ``grad[name]``, each [C, ...].

    Gradients of parameters are computed ``beside`` those of activations, which the next layer waits for.
    """

    def __init__(self, layout: Layout, values: Tensor, grads: Tensor | None = None, kernels=None, beside=None):
        self.value = layout.views(values)
        self.grad = layout.views(grads) if grads is not None else dict.fromkeys(self.value)
        self.kernels = kernels
        self.beside = beside or Beside(values.device)
        self.windows: dict[str, Window] = {}
        # Ties the first layer, whose input needs no gradient, into the backward pass.
        self.anchor = torch.zeros((), dtype=values.dtype, device=values.device, requires_grad=grads is not None)


@dataclass(frozen=True)
class Window:
    """How a kernel moves over a map of a given size, cut down to the taps that ever meet data.

    On a 1x1 map only the centre of a padded 3x3 kernel does: the other eight would multiply zeros.
    """

    rows: int
    columns: int
    kernel: int
    stride: int
    padding: int

    @staticmethod
    def _live(size: int, kernel: int, stride: int, padding: int) -> tuple[int, int]:
        out = (size + 2 * padding - kernel) // stride + 1
        taps = [k for k in range(kernel) if any(0 <= o * stride + k - padding < size for o in range(out))]
        return taps[0], taps[-1] + 1

    @property
    def out(self) -> tuple[int, int]:
        return tuple((s + 2 * self.padding - self.kernel) // self.stride + 1 for s in (self.rows, self.columns))

    @property
    def taps(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The live rows and columns of the kernel."""
        return tuple(self._live(s, self.kernel, self.stride, self.padding) for s in (self.rows, self.columns))

    @property
    def pointwise(self) -> bool:
        """Whether every output pixel sees one input pixel, its own."""
        (r0, r1), (c0, c1) = self.taps
        return (r1 - r0, c1 - c0, self.stride) == (1, 1, 1)

    @property
    def dead(self) -> list[int]:
        """The taps outside them, counted row by row."""
        (r0, r1), (c0, c1) = self.taps
        k = self.kernel
        return [t for t in range(k * k) if not (r0 <= t // k < r1 and c0 <= t % k < c1)]


def im2col(x: Tensor, window: Window, width: int) -> Tensor:
    """[C, N, H, W, ch] -> [C, N*H'*W', width]: the live taps' inputs of every output pixel, zero-padded."""
    (r0, r1), (c0, c1), (h, w) = *window.taps, window.out
    count, n, rows, columns, channels = x.shape
    s, p = window.stride, window.padding
    if window.pointwise and channels == width:
        return x.reshape(count, n * rows * columns, channels)
    # From the first live tap of the first output to the last live tap of the last one.
    low, high = [r0 - p, c0 - p], [(h - 1) * s + r1 - p, (w - 1) * s + c1 - p]
    x = F.pad(x, (0, 0, -low[1], high[1] - columns, -low[0], high[0] - rows))
    patches = x.unfold(2, r1 - r0, s).unfold(3, c1 - c0, s).permute(0, 1, 2, 3, 5, 6, 4)
    used = (r1 - r0) * (c1 - c0) * channels
    if used == width:
        return patches.reshape(count, n * h * w, width)
    cols = x.new_zeros(count, n * h * w, width)
    cols[..., :used].view(count, n, h, w, r1 - r0, c1 - c0, channels).copy_(patches)
    return cols


def col2im(cols: Tensor, window: Window, shape: torch.Size) -> Tensor:
    """The transpose of ``im2col``: every input pixel sums what its columns received."""
    (r0, r1), (c0, c1), (h, w) = *window.taps, window.out
    count, n, rows, columns, channels = shape
    s, p = window.stride, window.padding
    if window.pointwise and channels == cols.shape[-1]:
        return cols.reshape(shape)
    used = (r1 - r0) * (c1 - c0) * channels
    cols = cols[..., :used].unflatten(-1, (r1 - r0, c1 - c0, channels)).unflatten(1, (n, h, w))
    top, left = p - r0, p - c0
    height, length = (h - 1) * s + r1 - r0, (w - 1) * s + c1 - c0
    x = cols.new_zeros(count, n, max(height, top + rows), max(length, left + columns), channels)
    for i in range(r1 - r0):
        for j in range(c1 - c0):
            x[:, :, i : i + s * h : s, j : j + s * w : s].add_(cols[:, :, :, :, i, j])
    return x[:, :, top : top + rows, left : left + columns].contiguous()


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


# On a CPU, columns beyond this many bytes a client cost more than the library's own convolution, client by client.
LARGE = 1 << 22


def one_by_one(x: Tensor, window: Window) -> bool:
    """Whether this convolution is left to the library, one client after another."""
    if window.dead or x.dtype == torch.float64:
        return False
    if x.is_cuda:
        # One model, many images, no gradient that would need the columns again. For tensor cores only: in full float32
        # the library's channels-last convolution is far slower than columns.
        narrow = x.dtype != torch.float32 or torch.backends.cudnn.allow_tf32
        return narrow and len(x) == 1 and not torch.is_grad_enabled() and window.kernel > 1 and x.shape[-1] % 8 == 0
    rows = x.shape[1] * window.out[0] * window.out[1]
    return x.dtype == torch.float32 and rows * window.kernel**2 * x.shape[-1] * x.element_size() > LARGE


def torch_kernel(weight: Tensor, window: Window, channels: int) -> Tensor:
    """Stored weights [rows, out] as torch has them, [out, in, k, k]; a view."""
    k = window.kernel
    return weight[: k * k * channels].view(k, k, channels, -1).permute(3, 2, 0, 1)


class _OneByOne(torch.autograd.Function):
    """A convolution as torch's own, for every client in turn."""

    @staticmethod
    def forward(ctx, x, anchor, weight, grad, bias, bias_grad, window: Window, p: Stack):
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
    def backward(ctx, dout):
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
    def forward(ctx, x, anchor, weight, grad, bias, bias_grad, window: Window, p: Stack):
        cols = (p.kernels or _PLAIN).im2col(x, window, weight.shape[1])
        out = torch.bmm(cols, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), cols, weight)
        ctx.save_for_backward(cols, weight)
        ctx.window, ctx.shape, ctx.p, ctx.grads = window, x.shape, p, (grad, bias_grad)
        return out.view(*x.shape[:2], *window.out, out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        cols, weight = ctx.saved_tensors
        grad, bias_grad = ctx.grads
        dout = dout.reshape(dout.shape[0], -1, dout.shape[-1])

        def of_parameters() -> None:
            product_into(grad, cols, dout)
            if bias_grad is not None:
                torch.sum(dout, 1, out=bias_grad)

        ctx.p.beside(of_parameters, cols, dout)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (ctx.p.kernels or _PLAIN).col2im(torch.bmm(dout, weight.mT), ctx.window, ctx.shape)
        return dx, None, None, None, None, None, None, None


class _GroupNorm(torch.autograd.Function):
    """GroupNorm, then the residual if there is one, then ReLU if asked."""

    @staticmethod
    def forward(ctx, x, gamma, gamma_grad, beta, beta_grad, groups, residual, relu, p: Stack):
        out, mean, rstd = (p.kernels or _PLAIN).group_norm(x, gamma, beta, groups, residual, relu)
        ctx.save_for_backward(x, gamma, mean, rstd, out if relu else None)
        ctx.groups, ctx.p, ctx.has_residual, ctx.grads = groups, p, residual is not None, (gamma_grad, beta_grad)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, gamma, mean, rstd, out = ctx.saved_tensors
        dx, dresidual = (ctx.p.kernels or _PLAIN).group_norm_backward(
            dout.contiguous(), x, gamma, mean, rstd, out, ctx.groups, ctx.has_residual, *ctx.grads, ctx.p.beside
        )
        return dx, None, None, None, None, None, dresidual, None, None


def group_norm(x, gamma, beta, groups, residual, relu, eps=1e-5):
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


def group_norm_backward(dout, x, gamma, mean, rstd, out, groups, has_residual, gamma_grad, beta_grad, beside):
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

    beside(of_parameters, dy, normal)
    dnormal = dy * gamma.reshape(count, 1, 1, groups, -1)
    dx = rstd * (dnormal - dnormal.mean((2, 4), keepdim=True) - normal * (dnormal * normal).mean((2, 4), keepdim=True))
    return dx.reshape(x.shape).to(x.dtype), dout if has_residual else None


class _PLAIN:
    im2col = staticmethod(im2col)
    col2im = staticmethod(col2im)
    group_norm = staticmethod(group_norm)
    group_norm_backward = staticmethod(group_norm_backward)


def conv(p: Stack, name: str, x: Tensor, kernel: int, stride: int = 1, padding: int = 0) -> Tensor:
    window = Window(x.shape[2], x.shape[3], kernel, stride, padding)
    weight, bias = f"{name}.weight", f"{name}.bias"
    p.windows[weight] = window
    layer = _OneByOne if one_by_one(x, window) else _Convolution
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
