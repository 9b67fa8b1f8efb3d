"""The axes of an activation: how a user's code sees them, and how they lie in memory.

A user's map is [N, channels, rows, columns], a stacked one [C, N, rows, columns, channels]. Turning, flattening and
splitting axes then only changes the reading of the same memory, and a product behind a flattened map takes its columns
in the order that is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Axes:
    """The axes after the batch. Each consists of one or more atoms, and memory has all atoms in an order of its own.

    ``sizes`` has the atoms in the user's order, ``parts`` the number of them in each axis; ``order`` lists the atoms,
    by their places in ``sizes``, as they lie in memory.
    """

    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def plain(cls, shape: Sequence[int]) -> Axes:
        """Memory in the user's order."""
        return cls(tuple(shape), (1,) * len(shape), tuple(range(len(shape))))

    @classmethod
    def channels_last(cls, channels: int, rows: int, columns: int) -> Axes:
        return cls((channels, rows, columns), (1, 1, 1), (1, 2, 0))

    @cached_property
    def axes(self) -> list[tuple[int, ...]]:
        """The atoms of each axis."""
        ends = list(accumulate(self.parts))
        return [tuple(range(end - count, end)) for end, count in zip(ends, self.parts, strict=True)]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """As the user's code sees it, after the batch."""
        return tuple(prod(self.sizes[a] for a in axis) for axis in self.axes)

    @property
    def stored(self) -> tuple[int, ...]:
        """In memory, after client and image."""
        return tuple(self.sizes[a] for a in self.order)

    @property
    def simple(self) -> bool:
        """Whether every axis is one atom."""
        return all(count == 1 for count in self.parts)

    def place(self, axis: int) -> int:
        """Where an axis of one atom is in the stored tensor [C, N, ...]."""
        (atom,) = self.axes[axis]
        return 2 + self.order.index(atom)

    def permuted(self, axes: Sequence[int]) -> Axes:
        """The axes in another order; memory stays as it is."""
        atoms = [atom for axis in axes for atom in self.axes[axis]]
        sizes = tuple(self.sizes[atom] for atom in atoms)
        return Axes(sizes, tuple(self.parts[axis] for axis in axes), tuple(atoms.index(atom) for atom in self.order))

    def resized(self, axis: int, size: int) -> Axes:
        """An axis of one atom with another size."""
        (atom,) = self.axes[axis]
        return Axes((*self.sizes[:atom], size, *self.sizes[atom + 1 :]), self.parts, self.order)

    def regrouped(self, shape: Sequence[int]) -> Axes | None:
        """The same elements in another shape, where every new axis consists of atoms or parts of them.

        The stored tensor is to be viewed in the new ``stored``.
        """
        if prod(shape) != prod(self.sizes):
            return None
        # Atoms of one element are dropped, and made again where the new shape has an axis of one.
        left = [(atom, size) for atom, size in enumerate(self.sizes) if size > 1]
        pieces: list[tuple[int, int]] = []  # each with the atom that it is a part of
        parts = []
        for size in shape:
            count, remaining = 0, size
            while remaining > 1:
                atom, available = left.pop(0)
                taken = min(available, remaining)
                if available % taken or remaining % taken:
                    return None
                if available > taken:
                    left.insert(0, (atom, available // taken))
                pieces.append((atom, taken))
                remaining //= taken
                count += 1
            if not count:
                pieces.append((len(self.sizes), 1))  # stored last
            parts.append(max(count, 1))
        rank = {atom: position for position, atom in enumerate(self.order)}
        order = sorted(range(len(pieces)), key=lambda i: (rank.get(pieces[i][0], len(rank)), i))
        return Axes(tuple(size for _, size in pieces), tuple(parts), tuple(order))

    def arranged(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """The stored tensor with its atoms in another order of memory; a view."""
        if tuple(order) == self.order:
            return x
        return x.permute(0, 1, *(2 + self.order.index(atom) for atom in order))

    def as_seen(self, x: Tensor) -> Tensor:
        """The stored tensor as [C, N, *shape]."""
        x = self.arranged(x, range(len(self.order)))
        return x if self.simple else x.reshape(*x.shape[:2], *self.shape)
