"""How examples reach a module: images turned to [channels, rows, columns], other arrays as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..tasks.base import About, Array
from .axes import Axes

Stored: TypeAlias = "Tensor | dict[str, Tensor]"  # [..., *shape], or several arrays by name


def each(of: Stored, function: Callable[..., Tensor], *others: Any) -> Stored:
    """The function of the array, or of every one of several; ``others`` are of the same form."""
    if isinstance(of, Tensor):
        return function(of, *others)
    return {name: function(value, *(other[name] for other in others)) for name, value in of.items()}


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Arrays that are no images: floating-point numbers in the type that is computed in, integers as they are."""
    return values.to(dtype) if values.is_floating_point() else values


def nbytes(of: Stored) -> int:
    return sum(value.nbytes for value in ((of,) if isinstance(of, Tensor) else of.values()))


@dataclass(frozen=True)
class Form:
    """The inputs of a model: one array, or several by name, which are the keywords of its forward.

    ``image``: one array [rows, columns, channels], which modules get as [channels, rows, columns].
    """

    arrays: Array | Mapping[str, Array]
    image: bool = False

    @classmethod
    def of(cls, about: About | tuple[int, ...]) -> Form:
        """As ``about`` describes the data; a shape is that of an image."""
        if isinstance(about, About):
            return cls(about.inputs, about.image)
        return cls(Array("uint8", tuple(about)), image=True)

    @property
    def single(self) -> Array | None:
        """The only array; None where there are several."""
        return self.arrays if isinstance(self.arrays, Array) else None

    @property
    def seen_shape(self) -> str:
        """In messages: the shape that a module gets for one example."""
        if self.image:
            rows, columns, channels = self.arrays.shape  # type: ignore[union-attr]
            return f"images {[channels, rows, columns]}"
        if self.single:
            kind = "truth values" if self.single.dtype == "bool" else "arrays"
            return f"{kind} {list(self.single.shape)}"
        return ", ".join(f"{name} {list(array.shape)}" for name, array in self.arrays.items())  # type: ignore[union-attr]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arrays; a single one has none."""
        return ("",) if isinstance(self.arrays, Array) else tuple(self.arrays)

    def axes_of(self, name: str) -> Axes:
        """Of an array of the inputs."""
        if self.image:
            rows, columns, channels = self.arrays.shape  # type: ignore[union-attr]
            return Axes.channels_last(channels, rows, columns)
        return Axes.plain((self.arrays if isinstance(self.arrays, Array) else self.arrays[name]).shape)

    def integers(self, array: Array | None) -> bool:
        """Whether a module gets this array of the inputs as it is stored, such as tokens and masks."""
        return array is not None and not self.image and not array.dtype.startswith("float")

    def tokens(self, array: Array | None) -> bool:
        """Whether a module can look up this array of the inputs in a table."""
        return array is not None and self.integers(array) and array.dtype != "bool"

    def seen(self, stored: Stored) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Arguments of a module for stored examples [N, ...]: copies, which it may change."""
        if isinstance(stored, dict):
            return (), {name: value.clone() for name, value in stored.items()}
        if self.image:
            # Contiguous, as many modules use ``view``.
            return (stored.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format),), {}
        return (stored.clone(),), {}

    def made(self, lead: tuple[int, ...], number: Callable[[Array, tuple[int, ...]], Tensor]) -> Stored:
        """Stored examples [*lead, ...] of what ``number`` gives for a description and a shape."""
        if self.single:
            return number(self.single, (*lead, *self.single.shape))
        assert isinstance(self.arrays, Mapping)
        return {name: number(array, (*lead, *array.shape)) for name, array in self.arrays.items()}

    @property
    def unbounded(self) -> bool:
        """Whether there are integers whose range is not known, such as the negative ones of scans."""
        arrays = [self.arrays] if isinstance(self.arrays, Array) else self.arrays.values()
        return any(self.tokens(array) and not array.values for array in arrays)

    def random(self, *lead: int, draw: torch.Generator, dtype: torch.dtype = torch.float32, most: int = 1) -> Stored:
        """Examples to try a model on: normal numbers of type ``dtype``, integers of their range, and truth values.

        Integers whose range is not known are 0 to ``most``; beyond 1, and where their type has them, negative, too.
        """

        def number(array: Array, shape: tuple[int, ...]) -> Tensor:
            if array.dtype == "bool":
                return torch.randint(2, shape, generator=draw).bool()
            if self.integers(array):
                signed = not array.values and most > 1 and array.dtype.startswith("int")
                return torch.randint(-most if signed else 0, array.values or most + 1, shape, generator=draw)
            return torch.randn(shape, generator=draw, dtype=dtype)

        return self.made(lead, number)

    def zeros(self, *lead: int, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Stored:
        def number(array: Array, shape: tuple[int, ...]) -> Tensor:
            whole = torch.bool if array.dtype == "bool" else torch.int64
            return torch.zeros(shape, dtype=whole if self.integers(array) else dtype, device=device)

        return self.made(lead, number)
