"""What a user gives from Python as arrays: rows of one shape or of any length, several by name, and torch data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..support.errors import UserError, first_line, shortened, some
from ..support.user_code import users_code
from .manifest import Stored, is_name
from .rows import Inputs, Ragged, Rows, is_finite, longest, ragged, shifted, values_of, with_values


def inputs_of(given: Any, what: str) -> Inputs:
    """Arrays, rows of any length, or several of these by name."""
    if isinstance(given, Mapping):
        if not given:
            raise UserError(f"{what}: got no arrays, expected at least one")
        if odd := [name for name in given if not isinstance(name, str) or not is_name(name)]:
            raise UserError(f"{what}: got the name {shortened(odd[0])}, expected a keyword of the model, such as 'age'")
        return {name: _rows(rows, f"{what} {name!r}") for name, rows in given.items()}
    return _rows(given, what)


def alike(train: Inputs, test: Inputs) -> tuple[Inputs, Inputs]:
    """Rows that all have one length in one of the two parts only are ragged in both."""
    if isinstance(train, dict) and isinstance(test, dict) and train.keys() == test.keys():
        pairs = {name: _pair(train[name], test[name]) for name in train}
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}
    return (train, test) if isinstance(train, dict) or isinstance(test, dict) else _pair(train, test)


def _pair(train: Rows, test: Rows) -> tuple[Rows, Rows]:
    if isinstance(train, Ragged) and isinstance(test, np.ndarray) and test.ndim == 2:
        return train, ragged([*test])
    if isinstance(test, Ragged) and isinstance(train, np.ndarray) and train.ndim == 2:
        return ragged([*train]), test
    return train, test


def _rows(given: Any, what: str) -> Rows:
    if isinstance(given, Ragged):
        return given
    if isinstance(given, (list, tuple)) and given and all(_is_row(row) for row in given):
        rows = [array(row, what) for row in given]
        if len({row.shape for row in rows}) > 1:
            if odd := next((list(row.shape) for row in rows if row.ndim != 1), None):
                raise UserError(f"{what}: got a row of shape {odd}, expected all of one shape, or of one dimension")
            # An empty list has no type of its own.
            kind = np.result_type(*(row.dtype for row in rows if row.size))
            return ragged([native(row) if row.size else np.empty(0, kind) for row in rows])
        return native(np.stack(rows))
    return native(rows_of(given, what))


def like(stored: Stored, given: Any, what: str) -> Rows:
    """Rows of an array as a run was trained on; raises ``UserError`` for others."""
    rows = _rows(given, what)
    if isinstance(rows, np.ndarray) and stored.ragged and rows.ndim > 1:
        rows = ragged([*rows])
    values, shape = values_of(rows), stored.shape[1:] if stored.ragged else stored.shape
    if isinstance(rows, Ragged) != stored.ragged or values.shape[1:] != shape:
        expected = "rows of any length" if stored.ragged else f"[{', '.join(map(str, ('n', *stored.shape)))}]"
        raise UserError(f"{what}: got shape {list(values.shape)}, expected {expected}")
    if values.dtype.kind not in "biuf" or ((values.dtype.kind == "f") > (stored.dtype[0] == "f") and not stored.mean):
        raise UserError(f"{what}: got {values.dtype}, expected {stored.dtype}")
    if not is_finite(values):
        raise UserError(f"{what}: got numbers that are not finite, expected finite ones")
    if isinstance(rows, Ragged) and longest(rows) > stored.shape[0]:
        raise UserError(f"{what}: got a row of {longest(rows)}, expected at most {stored.shape[0]}, as in training")
    if stored.values and values.size and (values.min() < 0 or values.max() >= stored.values):
        odd = values.min() if values.min() < 0 else values.max()
        raise UserError(f"{what}: got {odd}, expected 0 to {stored.values - 1}, as in training")
    if stored.dtype == "bool" and not np.isin(values, (0, 1)).all():
        raise UserError(f"{what}: got {values.dtype} other than 0 and 1, expected bool")
    # A model's operations, such as ~ and looking up, take truth values and integers for different things.
    kinds = values.dtype.kind, np.dtype(stored.dtype).kind
    other = kinds[0] != "f" and kinds[0] != kinds[1] and (kinds[1] == "f" or "b" in kinds)
    return with_values(rows, values.astype(stored.dtype)) if other else rows


def _is_row(row: object) -> bool:
    return isinstance(row, (list, np.ndarray)) or hasattr(row, "detach")


def native(values: np.ndarray) -> np.ndarray:
    """In the byte order of this machine."""
    return values.astype(values.dtype.newbyteorder("="), copy=False) if values.dtype.kind in "iuf" else values


def next_tokens(tokens: Inputs) -> np.ndarray:
    """The targets of tokens."""
    values = None if isinstance(tokens, dict) else values_of(tokens)
    if (
        isinstance(tokens, dict)
        or values is None
        or values.dtype.kind not in "iu"
        or values.ndim + isinstance(tokens, Ragged) != 2
    ):
        raise UserError(
            "data: got no targets, expected them, or tokens as inputs: integers [n, length], or lists of them"
        )
    return shifted(tokens)


def names_of(given: Any, what: str) -> np.ndarray:
    """Names or numbers of owners; text may come as Python objects, as pandas has it."""
    owners = array(given, what)
    # numpy leaves NUL at the end of a name out, which may make one owner of two.
    each = given if isinstance(given, (list, tuple)) else owners.reshape(-1).tolist()
    if odd := next((name for name in each if isinstance(name, str) and "\0" in name), None):
        raise UserError(f"{what}: got the name {shortened(odd)}, expected one without NUL characters")
    text = owners.dtype == object and all(isinstance(owner, str) for owner in owners.reshape(-1))
    return owners.astype(str) if text else owners


def stacked(sets: dict[Any, Any], what: str) -> tuple[Any, Any, list[str | int]]:
    """All pairs of some data sets: inputs, targets and the owner of each."""
    xs, ys, owners = [], [], []
    if names := [name for name in sets if not isinstance(name, (str, int))]:
        raise UserError(f"data: {what} data sets: got the name {shortened(names[0])}, expected text or an integer")
    if len({str(name) for name in sets}) < len(sets):
        raise UserError(f"data: {what} data sets: got names that read the same, such as 1 and '1', expected others")
    for name, dataset in sets.items():
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(f"data: {what} data set {name!r}: got {shortened(dataset)}, expected one with a length")
        for i in range(len(dataset)):
            with users_code(f"data: {what} data set {name!r}", "pairs (x, y)"):
                pair = dataset[i]
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise UserError(f"data: {what} data set {name!r}: got {shortened(pair)}, expected pairs (x, y)")
            xs.append(pair[0])
            ys.append(array(pair[1], f"data: {what} targets"))
            owners.append(name)
        if not len(dataset):
            raise UserError(f"data: {what} data set {name!r} has no rows, expected at least one: leave it out")
    kinds = [sorted(map(str, x)) if isinstance(x, Mapping) else None for x in xs]
    if odd := next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0):
        found = [", ".join(kind) if kind else "one array" for kind in (kinds[0], kinds[odd])]
        raise UserError(f"data: {what} inputs: got {found[0]} in one row and {found[1]} in another, expected the same")
    if isinstance(xs[0], Mapping):
        inputs: Any = {key: [array(x[key], f"data: {what} inputs") for x in xs] for key in xs[0]}
    else:
        inputs = [array(x, f"data: {what} inputs") for x in xs]
    if len({y.shape for y in ys}) > 1:
        raise UserError(f"data: {what} targets have several shapes, expected one")
    return inputs, np.stack(ys), owners


def rows_of(given: object, what: str) -> np.ndarray:
    """One array with a row for each example."""
    if isinstance(given, Mapping):
        raise UserError(f"{what}: got a dict of {some(map(repr, given))}, expected one array; numpy.stack makes one")
    found = array(given, what)
    if not found.ndim:
        raise UserError(f"{what}: got a single value, expected an array with one row per example")
    return found


def array(given: object, what: str) -> np.ndarray:
    """The value as an array; a tensor may be on a GPU or have a gradient."""
    parts = given if isinstance(given, (list, tuple)) else [given]
    if any(isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part) for part in parts):
        raise UserError(f"{what}: got masked values, expected none: leave their rows out, or .filled(...) them")
    try:
        return np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{what}: got {type(given).__name__}, expected an array ({first_line(error)})") from None
