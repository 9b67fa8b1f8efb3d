"""Rows of inputs, which are an array, rows of any length, or several of these by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np


@dataclass
class Ragged:
    """Rows of any length, one after another: row i is ``values[starts[i]:starts[i + 1]]``."""

    values: np.ndarray
    starts: np.ndarray  # int64 [n + 1], from 0, not descending


Rows: TypeAlias = "np.ndarray | Ragged"
Inputs: TypeAlias = "np.ndarray | Ragged | dict[str, np.ndarray | Ragged]"


def named(inputs: Inputs) -> dict[str, Rows]:
    """The arrays by name; a single one has the name ""."""
    return inputs if isinstance(inputs, dict) else {"": inputs}


def unnamed(arrays: dict[str, Rows]) -> Inputs:
    """The reverse of ``named``."""
    return arrays[""] if [*arrays] == [""] else arrays


def length(array: Rows) -> int:
    return len(array.starts) - 1 if isinstance(array, Ragged) else len(array)


def count(inputs: Inputs) -> int:
    """The number of rows."""
    return length(next(iter(named(inputs).values())))


def values_of(array: Rows) -> np.ndarray:
    return array.values if isinstance(array, Ragged) else array


def with_values(array: Rows, values: np.ndarray) -> Rows:
    """Rows of the same lengths with other values."""
    return Ragged(values, array.starts) if isinstance(array, Ragged) else values


def has_floats(inputs: Inputs) -> bool:
    """Whether there is something to normalise."""
    return any(values_of(array).dtype.kind == "f" for array in named(inputs).values())


def as_floats(inputs: Inputs) -> Inputs:
    """Integers, such as the values of a scan, as floating-point numbers."""
    return unnamed(
        {name: with_values(array, values_of(array).astype(np.float32)) for name, array in named(inputs).items()}
    )


def take(inputs: Inputs, indices: np.ndarray) -> Inputs:
    """These rows."""
    return unnamed({name: take_rows(array, indices) for name, array in named(inputs).items()})


def take_rows(array: Rows, indices: np.ndarray) -> Rows:
    if not isinstance(array, Ragged):
        return array[indices]
    lengths = np.diff(array.starts)[indices]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    places = np.repeat(array.starts[:-1][indices] - starts[:-1], lengths) + np.arange(starts[-1])
    return Ragged(array.values[places], starts)


def joined(parts: list[Rows]) -> Rows:
    """One array of the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([values_of(part) for part in parts])
    if not isinstance(parts[0], Ragged):
        return values
    lengths = np.concatenate([np.diff(part.starts) for part in parts if isinstance(part, Ragged)])
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))


def joined_inputs(parts: list[Inputs]) -> Inputs:
    """One set of inputs of the rows of all parts, which have the same arrays."""
    names = named(parts[0])
    return unnamed({name: joined([named(part)[name] for part in parts]) for name in names})


def ragged(rows: list[np.ndarray]) -> Ragged:
    """Rows of any length as one array."""
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Ragged(np.concatenate(rows), starts)


def longest(array: Ragged) -> int:
    return int(np.diff(array.starts).max(initial=0))


def padded(array: Ragged, width: int, fill: int = 0) -> np.ndarray:
    """Rows of the given width; longer ones are cut, shorter ones filled up."""
    lengths = np.minimum(np.diff(array.starts), width)
    out = np.full((len(lengths), width, *array.values.shape[1:]), fill, array.values.dtype)
    inside = np.arange(width) < lengths[:, None]
    places = np.repeat(array.starts[:-1], lengths) + _within(lengths)
    out[inside] = array.values[places]
    return out


def _within(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... of each length in turn."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def shifted(tokens: Rows) -> np.ndarray:
    """The target of every token: the next one of its row, -1 where there is none."""
    width = longest(tokens) if isinstance(tokens, Ragged) else tokens.shape[1]
    values = values_of(tokens)
    kind = np.min_scalar_type(-int(values.max(initial=1)) - 1)  # signed, with room for the largest token
    if isinstance(tokens, Ragged):
        signed = Ragged(values.astype(kind), tokens.starts)
        dense = padded(signed, width, fill=-1)
    else:
        dense = values.astype(kind)
    return np.concatenate([dense[:, 1:], np.full_like(dense[:, :1], -1)], axis=1)


def is_finite(values: np.ndarray) -> bool:
    """Whether all numbers are; a sum tells it in one pass, without memory."""
    if values.dtype.kind != "f":
        return True
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum(dtype=np.float64)) or np.isfinite(values).all())
