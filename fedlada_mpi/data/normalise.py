"""Normalisation of arrays of floats, by all training rows or by each client's own, and the bins of times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..support.errors import UserError
from .rows import Ragged, Rows, joined, named, take_rows, unnamed, values_of, with_values
from .sources.base import ArraySet
from .write import Division

BINS = 10  # of time
DIGITS = 9  # the last ones of a sum depend on the machine, and the manifest must not


def statistics(array: Rows, chosen: np.ndarray | None = None) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the ``chosen`` rows: of each column of a table, otherwise of all numbers.

    Where all numbers are equal there is no deviation to divide by, and it is given as 1.
    """
    rows = array if chosen is None or len(chosen) == _rows(array) else take_rows(array, chosen)
    values = values_of(rows)
    columns = values if values.ndim == 2 and not isinstance(rows, Ragged) else values.reshape(-1, 1)
    if not columns.size:
        return [0.0] * columns.shape[1], [1.0] * columns.shape[1]
    mean = columns.mean(axis=0, dtype=np.float64)
    std = columns.std(axis=0, dtype=np.float64)
    std[columns.max(axis=0) == columns.min(axis=0)] = 1.0
    return [rounded(value) for value in mean], [rounded(value) or 1.0 for value in std]


def _rows(array: Rows) -> int:
    return len(array.starts) - 1 if isinstance(array, Ragged) else len(array)


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def normalised(array: Rows, mean: list[float], std: list[float]) -> Rows:
    """In its own type."""
    values = values_of(array)
    wide = (values.astype(np.float64) - np.array(mean)) / np.array(std)
    return with_values(array, wide.astype(values.dtype))


def by_client(examples: ArraySet, division: Division) -> tuple[ArraySet, Division]:
    """The rows of each client normalised by its own training rows, its test rows, too; nobody's rows by all.

    A row that several clients have is there once for each, so the new division has other numbers of rows.
    """
    owned, tested = division.owned, division.tested
    train, test = {}, {}
    for name, array in named(examples.inputs).items():
        tests = named(examples.test_inputs)[name]
        if values_of(array).dtype.kind != "f":
            train[name] = joined([take_rows(array, part) for part in (*owned, division.held)])
            test[name] = tests if tested is None else joined([take_rows(tests, part) for part in tested])
            continue
        pooled, own = statistics(array, division.kept), [statistics(array, part) for part in owned]
        parts = [normalised(take_rows(array, part), *by) for part, by in zip(owned, own, strict=True)]
        train[name] = joined([*parts, normalised(take_rows(array, division.held), *pooled)])
        test[name] = normalised(tests, *pooled)
        if tested is not None:
            pairs = zip(tested, own, strict=True)
            test[name] = joined([normalised(take_rows(tests, part), *by) for part, by in pairs])
    order = np.concatenate([*owned, division.held])
    test_order = np.arange(len(examples.test_targets)) if tested is None else np.concatenate(tested)
    new = replace(
        examples,
        inputs=unnamed(train),
        targets=examples.targets[order],
        test_inputs=unnamed(test),
        test_targets=examples.test_targets[test_order],
        owners=None,
        test_owners=None,
    )
    return new, _in_order(division)


def _in_order(division: Division) -> Division:
    """The same division of rows that lie one client after another, the held out ones last."""

    def ranges(parts: list[np.ndarray]) -> list[np.ndarray]:
        return np.split(np.arange(sum(map(len, parts))), np.cumsum([len(part) for part in parts]))[:-1]

    *owned, held = ranges([*division.owned, division.held])
    tested = None if division.tested is None else ranges(division.tested)
    return replace(division, owned=owned, kept=np.arange(sum(map(len, owned))), held=held, tested=tested)


def time_edges(targets: np.ndarray, bins: int = BINS) -> list[float]:
    """Of events and times [n, 2], the ends of at most ``bins`` bins of time that have as many events each.

    The last event ends the last bin. Times are rounded to single precision, in which they are compared.
    """
    times = targets[targets[:, 0] > 0, 1].astype(np.float32)
    if not len(times):
        raise UserError(f"got {len(targets)} training rows without any event, expected at least one for survival")
    return np.unique(np.quantile(times, np.arange(1, bins + 1) / bins, method="inverted_cdf")).tolist()
