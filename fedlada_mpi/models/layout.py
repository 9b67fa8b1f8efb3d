"""One flat vector per quantity: where each parameter of a model is in it, and in which order.

Weights of convolutions and linear layers are stored the way the stacked products read them: [inputs, outputs],
inputs in (tap, channel) order. Taps that never meet data (``Window.dead``) have no gradient, whatever the images:
these gradient-free parameters are stored together at the end of the vector, after ``live`` elements that may have one.
Every block starts on a 256-byte boundary; the elements in between are zero and stay zero under every method, so
that norms, sums and means are those of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

Kernel: TypeAlias = tuple[int, int, int, int]  # out, in, rows, columns
ALIGN = 64  # elements
ROWS = 16  # a product's inner dimension is padded to a multiple of this


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Entry:
    """A parameter: its torch shape, its stored shape, and its places among the live and the gradient-free elements.

    ``kernel`` is set for weights of products: the [out, in, rows, columns] reading of the torch shape (a linear
    layer has 1x1, one behind a flattened map has the map's size); ``taps`` is their order, live ones first.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    offset: int
    kernel: Kernel | None = None
    taps: tuple[int, ...] = ()
    groups: int = 1  # of a convolution; each has a product of its own
    gradient_free_rows: int = 0
    gradient_free_offset: int = 0

    def live(self, flat: Tensor) -> Tensor:
        """The parameter in ``flat`` [..., live or more], without its gradient-free rows."""
        return flat[..., self.offset : self.offset + prod(self.stored)].view((*flat.shape[:-1], *self.stored))

    def gradient_free(self, flat: Tensor) -> Tensor:
        """The gradient-free rows of a product's weights in ``flat`` [size]."""
        assert self.kernel is not None
        shape = (self.gradient_free_rows, self.kernel[0])
        return flat[self.gradient_free_offset : self.gradient_free_offset + prod(shape)].view(shape)

    def store(self, value: Tensor, flat: Tensor) -> None:
        if self.kernel is None:
            self.live(flat).copy_(value)
            return
        out, channels, *_ = self.kernel
        if self.groups > 1:
            products = value.reshape(self.groups, out // self.groups, *self.kernel[1:]).permute(0, 3, 4, 2, 1)
            rows = products.reshape(self.groups, -1, out // self.groups)
            self.live(flat)[:, : rows.shape[1]].copy_(rows)
            return
        rows = value.reshape(self.kernel).permute(2, 3, 1, 0).reshape(-1, channels, out)[list(self.taps)].flatten(0, 1)
        split = len(rows) - self.gradient_free_rows
        self.live(flat)[:split].copy_(rows[:split])
        self.gradient_free(flat).copy_(rows[split:])

    def load(self, flat: Tensor) -> Tensor:
        if self.kernel is None:
            return self.live(flat).clone()
        out, channels, height, width = self.kernel
        if self.groups > 1:
            used = self.live(flat)[:, : height * width * channels]
            products = used.view(self.groups, height, width, channels, -1).permute(0, 4, 3, 1, 2)
            return products.reshape(self.shape).contiguous()
        split = channels * height * width - self.gradient_free_rows
        rows = torch.cat((self.live(flat)[:split], self.gradient_free(flat))).view(-1, channels, out)
        value = torch.empty_like(rows)
        value[list(self.taps)] = rows
        return value.view(height, width, channels, out).permute(3, 2, 0, 1).reshape(self.shape).contiguous()


class Layout:
    """The place of every parameter in a flat vector.

    >>> layout = Layout([("weight", (2, 3)), ("bias", (2,))])
    >>> flat = layout.pack({"weight": torch.ones(2, 3), "bias": torch.tensor([5.0, 6.0])})
    >>> flat.shape, layout.numel, layout.tensors
    (torch.Size([128]), 8, [[slice(0, 6, None)], [slice(64, 66, None)]])
    >>> layout.unpack(flat)["bias"]
    tensor([5., 6.])
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Sequence[int]]],
        kernels: Mapping[str, Kernel] | None = None,
        dead: Mapping[str, Sequence[int]] | None = None,
        groups: Mapping[str, int] | None = None,
    ):
        """``kernels`` names the weights of products; ``dead`` the taps of each that never meet data; ``groups`` those
        that are one product per group, which have no dead taps."""
        kernels, dead, groups = kernels or {}, dead or {}, groups or {}
        entries: list[Entry] = []
        offset = gradient_free = 0
        for name, torch_shape in parameters:
            shape, kernel = tuple(torch_shape), kernels.get(name)
            if kernel is None:
                entries.append(Entry(name, shape, shape, offset))
            elif (count := groups.get(name, 1)) > 1:
                out, channels, height, width = kernel
                products = (count, round_up(height * width * channels, ROWS), out // count)
                entries.append(Entry(name, shape, products, offset, kernel, groups=count))
            else:
                out, channels, height, width = kernel
                gone = list(dead.get(name, ()))
                taps = [t for t in range(height * width) if t not in gone]
                stored = (round_up(len(taps) * channels, ROWS), out)
                rows = len(gone) * channels
                entries.append(Entry(name, shape, stored, offset, kernel, (*taps, *gone), 1, rows, gradient_free))
                gradient_free = round_up(gradient_free + rows * out, ALIGN)
            offset = round_up(offset + prod(entries[-1].stored), ALIGN)
        self.live, self.size = offset, offset + gradient_free
        self.entries = tuple(
            replace(e, gradient_free_offset=e.gradient_free_offset + offset) if e.kernel else e for e in entries
        )
        self.numel = sum(prod(e.shape) for e in entries)

    @property
    def tensors(self) -> list[list[slice]]:
        """Where each parameter is in a flat vector; gradient-free parts have a place of their own."""
        places = []
        for e in self.entries:
            live, free = prod(e.stored), e.gradient_free_rows * (e.kernel[0] if e.kernel else 0)
            starts = ((e.offset, live), (e.gradient_free_offset, free))
            places.append([slice(start, start + length) for start, length in starts if length])
        return places

    @property
    def real(self) -> Tensor:
        """One at the elements of parameters, zero at those in between."""
        return self.pack({e.name: torch.ones(e.shape) for e in self.entries})

    @property
    def weights(self) -> Tensor:
        """One at the elements of tensors with more than one axis, zero at those of others: biases and norms."""
        flat = torch.zeros(self.size)
        for e, places in zip(self.entries, self.tensors, strict=True):
            for place in places:
                flat[place] = float(len(e.shape) > 1)
        return flat

    @property
    def order(self) -> str:
        """A digest of where every number of every parameter is; "generic" in torch's own order, that engine's."""
        if all(e.kernel is None for e in self.entries):
            return "generic"
        return hashlib.sha256(repr(self.entries).encode()).hexdigest()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The live parameters in ``flat`` [..., live or more], stored shapes, sharing its memory."""
        return {e.name: e.live(flat) for e in self.entries}

    def pack(self, state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        flat = torch.zeros(self.size, dtype=dtype)
        for e in self.entries:
            e.store(state[e.name].detach().to("cpu", dtype), flat)
        return flat

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """The state_dict in ``flat`` [size], torch shapes, own memory."""
        return {e.name: e.load(flat.detach()) for e in self.entries}
