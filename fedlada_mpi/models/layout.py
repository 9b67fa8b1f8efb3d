"""One flat vector per quantity: where each parameter of a model lies in it, and in which order.

Convolution and linear weights are stored the way the stacked products read them ([inputs, outputs],
inputs in (row, column, channel) order); every parameter starts on a 256-byte boundary. The elements in
between are zero and stay zero under every method, so norms, sums and means are those of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGN = 64  # elements
ROWS = 16  # a product's inner dimension is padded to a multiple of this


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Entry:
    """A parameter: its torch shape, and its shape and place in the flat vector.

    ``kernel`` is set for weights that are products in the stacked network: the [out, in, rows, columns]
    reading of the torch shape (a linear layer has 1x1, one behind a flattened map has the map's size).
    """

    name: str
    shape: tuple[int, ...]
    kernel: tuple[int, int, int, int] | None
    stored: tuple[int, ...]
    offset: int

    def store(self, value: Tensor, view: Tensor) -> None:
        if self.kernel is None:
            view.copy_(value)
        else:
            out, channels, rows, columns = self.kernel
            inputs = channels * rows * columns
            view[:inputs].copy_(value.reshape(self.kernel).permute(2, 3, 1, 0).reshape(inputs, out))

    def load(self, view: Tensor) -> Tensor:
        if self.kernel is None:
            return view.clone()
        out, channels, rows, columns = self.kernel
        value = view[: channels * rows * columns].reshape(rows, columns, channels, out)
        return value.permute(3, 2, 0, 1).reshape(self.shape).contiguous()


class Layout:
    def __init__(self, parameters: Iterable[tuple[str, torch.Size]], kernels: Mapping[str, tuple[int, ...]] | None = None):
        kernels = kernels or {}
        entries, offset = [], 0
        for name, shape in parameters:
            kernel = kernels.get(name)
            stored = tuple(shape) if kernel is None else (round_up(prod(kernel[1:]), ROWS), kernel[0])
            entries.append(Entry(name, tuple(shape), kernel, stored, offset))
            offset = round_up(offset + prod(stored), ALIGN)
        self.entries = tuple(entries)
        self.size = offset
        self.numel = sum(prod(e.shape) for e in entries)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in ``flat`` [..., size], stored shapes, sharing its memory."""
        lead = flat.shape[:-1]
        return {e.name: flat[..., e.offset : e.offset + prod(e.stored)].view(*lead, *e.stored) for e in self.entries}

    def pack(self, state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        flat = torch.zeros(self.size, dtype=dtype)
        views = self.views(flat)
        for e in self.entries:
            e.store(state[e.name].detach().to("cpu", dtype), views[e.name])
        return flat

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """The state_dict in ``flat`` [size], torch shapes, own memory."""
        views = self.views(flat.detach())
        return {e.name: e.load(views[e.name]) for e in self.entries}
