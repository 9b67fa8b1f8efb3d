"""Checks of targets that several tasks share: each raises UserError with one line."""

from __future__ import annotations

import numpy as np

from ..support.errors import UserError

WIDEST = float(np.finfo(np.float32).max)  # training may run in single precision


def found(targets: np.ndarray) -> str:
    """What targets are: ``float64 of shape [100, 2]``."""
    return f"{targets.dtype} of shape {list(targets.shape)}"


def check_kind(targets: np.ndarray, kinds: str, dimensions: tuple[int, ...], where: str, expected: str) -> None:
    """Refuse types other than numpy's ``kinds`` and numbers of dimensions other than these; ``expected``: in words."""
    if targets.dtype.kind not in kinds or targets.ndim not in dimensions:
        raise UserError(f"{where}: got targets of {found(targets)}, expected {expected}")


def check_example(targets: np.ndarray, shape: tuple[int, ...] | None, where: str) -> None:
    """Refuse targets of which one example has another shape than the rest of the data."""
    if shape is not None and targets.shape[1:] != shape:
        expected = ", ".join(map(str, ("n", *shape)))
        raise UserError(
            f"{where}: got targets of shape {list(targets.shape)}, expected [{expected}] as in the rest of the data:"
            " prepare all of it alike"
        )


def check_finite(targets: np.ndarray, where: str) -> None:
    """Refuse NaN, infinities, and what becomes infinite in single precision."""
    if targets.dtype.kind != "f":
        return
    good = np.isfinite(targets) if targets.itemsize <= 4 else np.abs(targets) <= WIDEST  # which NaN is not, either
    if not good.all():
        row, value = first_bad(targets, good)
        raise UserError(
            f"{where}: the target of row {row} is {value}, expected a finite number: leave such rows out or fill them"
        )


def check_range(targets: np.ndarray, good: np.ndarray, where: str, expected: str) -> None:
    """Refuse targets that are not ``good``, naming the first."""
    if not good.all():
        row, value = first_bad(targets, good)
        raise UserError(f"{where}: the target of row {row} is {value}, expected {expected}")


def first_bad(targets: np.ndarray, good: np.ndarray) -> tuple[int, object]:
    """The row and the value of the first target that is not ``good``."""
    place = np.unravel_index(int(np.argmin(good)), good.shape)
    return int(place[0]), targets[place].item()
