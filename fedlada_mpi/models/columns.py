"""Convolutions as products: where a kernel's taps meet a map, and the columns of a map that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Pair: TypeAlias = tuple[int, int]


def pair(value: int | Sequence[int]) -> Pair:
    """Rows and columns of what torch gives as one number or as two."""
    rows, columns = (value, value) if isinstance(value, int) else value
    return rows, columns


@dataclass(frozen=True)
class Window:
    """How a kernel moves over a map of a given size, and which of its taps are live, that is, ever meet data.

    On a 1x1 map only the centre of a padded 3x3 kernel does: the other eight would multiply zeros.
    """

    rows: int
    columns: int
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @property
    def even(self) -> bool:
        """Whether taps are adjacent and the stride is the same for rows and columns; ``im2col`` takes only these."""
        return self.dilation == (1, 1) and self.stride[0] == self.stride[1]

    def _out(self, size: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - reach) // self.stride[axis] + 1

    def _live(self, size: int, axis: int) -> Pair:
        """The first live tap along a side of the map, and the one after the last."""
        if not self.even:
            return 0, self.kernel[axis]
        places = [o * self.stride[axis] - self.padding[axis] for o in range(self._out(size, axis))]
        taps = [k for k in range(self.kernel[axis]) if any(0 <= place + k < size for place in places)]
        return taps[0], taps[-1] + 1

    @cached_property
    def out(self) -> Pair:
        """Rows and columns of the output."""
        return self._out(self.rows, 0), self._out(self.columns, 1)

    @cached_property
    def taps(self) -> tuple[Pair, Pair]:
        """The live rows and columns of the kernel."""
        return self._live(self.rows, 0), self._live(self.columns, 1)

    @cached_property
    def pointwise(self) -> bool:
        """Whether every output pixel sees one input pixel, its own."""
        (r0, r1), (c0, c1) = self.taps
        one_tap = (r1 - r0, c1 - c0) == (1, 1) and self.stride == (1, 1)
        return one_tap and self.out == (self.rows, self.columns)

    @cached_property
    def keeps_size(self) -> bool:
        """Whether adjacent taps, several of them, give as many output pixels as there are input pixels."""
        return self.even and self.stride == (1, 1) and self.out == (self.rows, self.columns) and not self.pointwise

    @cached_property
    def dead(self) -> list[int]:
        """The taps outside them, counted row by row."""
        (r0, r1), (c0, c1) = self.taps
        height, width = self.kernel
        return [t for t in range(height * width) if not (r0 <= t // width < r1 and c0 <= t % width < c1)]


@dataclass(frozen=True)
class Columns:
    """A map as the convolution that reads it needs it: what ``im2col`` would give."""

    columns: Tensor


def im2col(x: Tensor, window: Window, width: int) -> Tensor:
    """[C, N, H, W, ch] -> [C, N*H'*W', width]: the live taps' inputs of every output pixel, zero-padded."""
    count, n, rows, columns, channels = x.shape
    if window.pointwise:
        pixels = x.reshape(count, n * rows * columns, channels)
        return pixels if channels == width else F.pad(pixels, (0, width - channels))
    (r0, r1), (c0, c1), (h, w) = *window.taps, window.out
    s, (pr, pc) = window.stride[0], window.padding
    # From the first live tap of the first output to the last live tap of the last one.
    low, high = [r0 - pr, c0 - pc], [(h - 1) * s + r1 - pr, (w - 1) * s + c1 - pc]
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
    count, n, rows, columns, channels = shape
    if window.pointwise:
        return cols[..., :channels].reshape(shape)
    (r0, r1), (c0, c1), (h, w) = *window.taps, window.out
    s, (pr, pc) = window.stride[0], window.padding
    used = (r1 - r0) * (c1 - c0) * channels
    cols = cols[..., :used].unflatten(-1, (r1 - r0, c1 - c0, channels)).unflatten(1, (n, h, w))
    top, left = pr - r0, pc - c0
    height, length = (h - 1) * s + r1 - r0, (w - 1) * s + c1 - c0
    x = cols.new_zeros(count, n, max(height, top + rows), max(length, left + columns), channels)
    for i in range(r1 - r0):
        for j in range(c1 - c0):
            x[:, :, i : i + s * h : s, j : j + s * w : s].add_(cols[:, :, :, :, i, j])
    return x[:, :, top : top + rows, left : left + columns].contiguous()


class ColumnBuffers:
    """``im2col`` and ``col2im`` for maps of one shape, on buffers that are kept with the views of their taps.

    Of a small map, making these views takes longer than the arithmetic. Every element is the same to the bit: taps are
    added up in the same order.
    """

    def __init__(self, window: Window, shape: torch.Size, like: Tensor):
        self.shape, self.window = shape, window
        count, n, rows, columns, channels = shape
        (r0, r1), (c0, c1), (h, w) = *window.taps, window.out
        s, (pr, pc) = window.stride[0], window.padding
        self.height, self.length = r1 - r0, c1 - c0
        top, left = pr - r0, pc - c0
        size = (max((h - 1) * s + self.height, top + rows), max((w - 1) * s + self.length, left + columns))
        self.inside = (..., slice(top, top + rows), slice(left, left + columns), slice(None))
        self.maps, self.gradients = (like.new_zeros(count, n, *size, channels) for _ in range(2))
        self.map, self.gradient = self.maps[self.inside], self.gradients[self.inside]
        self.patches = self._patches(self.maps)
        self.taps = [tap for row in self._patches(self.gradients).unbind(4) for tap in row.unbind(4)]
        self.used = self.height * self.length * channels
        self.wide: dict[int, tuple[Tensor, Tensor]] = {}  # by the width of the columns, where it is more than is used

    def _patches(self, maps: Tensor) -> Tensor:
        """[C, N, H', W', rows, columns, channels], of the live taps; a view."""
        s, (h, w) = self.window.stride[0], self.window.out
        windows = maps.unfold(2, self.height, s).unfold(3, self.length, s)[:, :, :h, :w]
        return windows.permute(0, 1, 2, 3, 5, 6, 4)

    def im2col(self, x: Tensor, width: int) -> Tensor:
        self.map.copy_(x)
        rows = self.patches.shape[:4].numel() // len(x)
        if width == self.used:
            columns = self.patches.reshape(len(x), rows, width)
            # Of windows as wide as the map, that is the buffer itself.
            return columns.clone() if columns.data_ptr() == self.maps.data_ptr() else columns
        if width not in self.wide:
            columns = self.maps.new_zeros(len(x), rows, width)
            self.wide[width] = columns, columns[..., : self.used].view(self.patches.shape)
        columns, used = self.wide[width]
        used.copy_(self.patches)
        return columns.clone()

    def col2im(self, cols: Tensor) -> Tensor:
        channels, width = self.shape[-1], cols.shape[-1]
        n, h, w = self.patches.shape[1:4]
        of_taps = cols.as_strided(
            (len(cols), n, h, w, self.height * self.length, channels),
            (n * h * w * width, h * w * width, w * width, width, channels, 1),
        )
        self.gradients.zero_()
        torch._foreach_add_(self.taps, list(of_taps.unbind(4)))
        return self.gradient.clone(memory_format=torch.contiguous_format)
