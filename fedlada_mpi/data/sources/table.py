"""A table as a CSV file: a row per example, with a target, and perhaps a column that says whose the row is."""

from __future__ import annotations

import csv
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...support.errors import UserError, shortened
from ...support.suggestions import did_you_mean
from ..json_checks import LARGEST
from .base import ArraySet
from .bounds import check_memory

TEST_SHARE, TEST_SEED = 0.2, 0  # not the partition's seed: all partitions of a table have the same test rows
MOST_VALUES = 20  # of a column of text, which becomes a column for each
MISSING = ("", "na", "n/a", "#n/a", "#na", "<na>", "nan", "null", "?")  # in any case
NOTHING = ("none", "nil", "-", "--", ".")  # missing among numbers and owners; among words they may be one
TRUTH = {"true": 1.0, "false": 0.0}
EXACT = 2.0**53  # from here on, two codes may be the same double: as classes they are text
MOST_ROUNDED = 0.01  # of the standard deviation of a column
DELIMITERS = ",;\t|"
DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?")
BYTES = 12  # of memory for each byte of a table, as text and as numbers


def load_csv(
    raw: Path,
    workers: int = 1,
    target: Sequence[str] = (),
    client: str = "",
    drop: Sequence[str] = (),
    test_share: float | None = None,
    task: str = "",
) -> ArraySet:
    """Numbers as they are, text as a column of 0 and 1 for each value; of every client a share of rows for testing."""
    columns = read_columns(raw)
    for option, names in (("target", target), ("client", [client] if client else []), ("drop", drop)):
        for name in names:
            if name not in columns:
                known = ", ".join([*columns][:20])
                raise UserError(
                    f"--{option}: no column {name!r} in {raw}, expected of {known}{did_you_mean(name, columns)}"
                )
    if not target:
        raise UserError(f"--dataset csv: no target given, expected --target COLUMN of {', '.join([*columns][:20])}")
    if client in target:
        raise UserError(f"--client: got {client!r}, which is the target, expected another column")
    if odd := next((name for name in drop if name in (*target, client)), None):
        raise UserError(f"--drop: got {odd!r}, which is the {'target' if odd in target else 'client'}: leave it out")
    for name in target:
        check_complete(name, columns[name], raw)
    targets, names, task = targets_of({name: columns[name] for name in target}, task, raw)
    owners = None
    if client:
        check_complete(client, columns[client], raw, missing=(*MISSING, *NOTHING))
        owners = _numbered(columns[client])
    inputs, features = features_of({n: c for n, c in columns.items() if n not in {*target, client, *drop}}, raw)
    share = TEST_SHARE if test_share is None else test_share
    kept, held = split(share, owners, len(targets), raw)
    test_owners = None if owners is None else owners[held]
    return ArraySet(
        inputs[kept],
        targets[kept],
        inputs[held],
        targets[held],
        None if owners is None else owners[kept],
        test_owners,
        names,
        task,
        feature_names=features,
        test_share=share,
    )


def read_columns(raw: Path) -> dict[str, list[str]]:
    """The columns of the table by their names."""
    if not raw.is_file():
        raise UserError(f"--raw: got {raw}, expected a CSV file")
    check_memory(raw.stat().st_size * BYTES, raw)
    try:
        with raw.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            delimiter = max(DELIMITERS, key=first.count)
            lines = csv.reader(_without_nul(file), delimiter=delimiter, strict=True)
            header, *rows = [[cell.strip() for cell in line] for line in lines if line] or [[]]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{raw}: not a table of text ({error}): save it as CSV in UTF-8") from None
    if not rows:
        raise UserError(f"{raw}: no rows, expected a line with the names of the columns and a line per row")
    if "" in header:
        raise UserError(f"{raw}: column {header.index('') + 1} has no name, expected a name for each")
    if twice := next((name for name, times in Counter(header).items() if times > 1), None):
        raise UserError(f"{raw}: two columns are called {shortened(twice)}, expected another name for each")
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise UserError(f"{raw}: row {number} has {len(row)} cells, expected {len(header)}, as the first line")
    return dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))


def _without_nul(lines: Iterable[str]) -> Iterator[str]:
    """Refuse binary files, and names that numpy would cut."""
    for line in lines:
        if "\0" in line:
            raise csv.Error("it has bytes of 0")
        yield line


def check_complete(
    name: str,
    column: list[str],
    raw: Path,
    advice: str = "fill it in, or remove the row",
    missing: Sequence[str] = MISSING,
) -> None:
    if row := next((row for row, cell in enumerate(column, 1) if cell.lower() in missing), 0):
        raise UserError(f"{raw}: column {name!r} has no value in row {row}: {advice}")


def numbers(name: str, column: list[str], raw: Path) -> np.ndarray | None:
    """The column as numbers; None where it is text. What is missing is refused."""
    check_complete(name, column, raw, f"fill it in, remove the row, or add --drop {shlex.quote(name)}")
    if all(cell.lower() in TRUTH for cell in column):
        return np.array([TRUTH[cell.lower()] for cell in column])
    try:
        values = np.array([_number(cell) for cell in column])
    except ValueError:
        if all(DECIMAL_COMMA.fullmatch(cell) for cell in column):
            raise UserError(f"{raw}: column {name!r} has decimal commas, expected points, as in 2.5") from None
        _refuse_odd_cell(name, column, raw)
        return None
    if (odd := np.flatnonzero(~(np.abs(values) <= LARGEST))).size:
        got = column[odd[0]]
        raise UserError(
            f"{raw}: column {name!r} has {shortened(got)} in row {odd[0] + 1}, expected a number up to {LARGEST:g}"
        )
    return values


def single(name: str, values: np.ndarray, raw: Path, advice: str = "") -> np.ndarray:
    """The numbers as float32, unless that takes away what they differ by, as from seconds since 1970."""
    cast, smallest = values.astype(np.float32), values.min()
    noise = 16 * np.spacing(np.abs(values).max())  # such as 0.3 and 0.1 + 0.2
    if np.abs(cast - values).max() > MOST_ROUNDED * values.std() and np.ptp(values) > noise:
        raise UserError(
            f"{raw}: column {name!r} has numbers from {smallest:.15g} to {values.max():.15g}, which float32 rounds by "
            f"{np.abs(cast - values).max():.2g}, expected less than {MOST_ROUNDED:.0%} of their standard deviation: "
            f"subtract {smallest:.15g} from all{advice}"
        )
    return cast


def _refuse_odd_cell(name: str, column: list[str], raw: Path) -> None:
    """A column that is mostly numbers is no text because of a few cells."""
    odd = [row for row, cell in enumerate(column) if not _is_number(cell)]
    words = sum(column[row].lower() not in NOTHING for row in odd)
    if len(column) - len(odd) > words:
        raise UserError(
            f"{raw}: column {name!r} has {shortened(column[odd[0]])} in row {odd[0] + 1}, expected a number, as in "
            "other rows: correct it, or remove the row; if these are codes, put a letter before each"
        )


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def _number(cell: str) -> float:
    if "_" in cell:  # which Python would leave out: 12_34 is more likely a code
        raise ValueError(cell)
    return float(cell)


def features_of(columns: dict[str, list[str]], raw: Path) -> tuple[np.ndarray, list[str]]:
    """The inputs [n, features] as float32, and the names of the features."""
    parts, names = [], []
    for name, column in columns.items():
        values = numbers(name, column, raw)
        if values is not None:
            parts.append(single(name, values, raw, f", or add --drop {shlex.quote(name)}"))
            names.append(name)
            continue
        found = sorted(set(column))
        if len(found) > MOST_VALUES:
            raise UserError(
                f"{raw}: column {name!r} is text with {len(found)} values, expected at most {MOST_VALUES}: "
                f"add --drop {shlex.quote(name)}, or make numbers of it"
            )
        cells = np.array(column)
        parts += [(cells == value).astype(np.float32) for value in found]
        names += [f"{name}={value}" for value in found]
    if not parts:
        raise UserError(f"{raw}: no columns are left for the inputs, expected some besides target and client")
    return np.stack(parts, axis=1), names


def targets_of(columns: dict[str, list[str]], task: str, raw: Path) -> tuple[np.ndarray, list[str], str]:
    """The targets, the names of their classes, and the task."""
    parts = {name: numbers(name, column, raw) for name, column in columns.items()}
    name = next(iter(columns))
    if len(columns) == 1 and task in ("", "classification", "regression"):
        column, values = columns[name], parts[name]
        truth = all(cell.lower() in TRUTH for cell in column)
        if task == "classification" and values is not None and np.abs(values).max() >= EXACT:
            values = None
        if task == "regression" or (not task and values is not None and not truth):
            if values is None:
                raise UserError(
                    f"--task regression: column {name!r} is text, expected numbers, or --task classification"
                )
            return single(name, values, raw), [], "regression"
        if truth and len({*column}) > 2:  # true and True are one class
            column = [cell.lower() for cell in column]
        cells = np.array(column) if values is None or truth else values
        found, labels = np.unique(cells, return_inverse=True)
        most = max(MOST_VALUES, len(column) // 2)
        if len(found) > most and values is None:
            raise UserError(
                f"--target: column {name!r} is text with {len(found)} values in {len(column)} rows, expected at most "
                f"{most} classes: make numbers of it, or choose another column"
            )
        if len(found) > most:
            raise UserError(f"--task classification: column {name!r} has {len(found)} values: use --task regression")
        names = [_exact(value) if isinstance(value, float) else str(value) for value in found.tolist()]
        return labels.reshape(-1).astype(np.int64), names, "classification"
    if odd := next((name for name, values in parts.items() if values is None), None):
        raise UserError(f"--target: column {odd!r} is text, expected numbers for --task {task or 'survival'}")
    table = np.stack([values for values in parts.values() if values is not None], axis=1)
    if task == "survival" and table.shape[1] != 2:
        raise UserError(f"--task survival: got {len(columns)} target, expected --target EVENT TIME")
    if task == "multilabel":
        if not np.isin(table, (0, 1)).all():
            raise UserError(f"{raw}: --task multilabel: the targets have other values, expected 0 or 1 in each")
        return table.astype(bool), [*columns], task
    if task in ("survival", "regression"):
        return np.stack([single(each, table[:, i], raw) for i, each in enumerate(parts)], axis=1), [], task
    raise UserError(
        f"--target: got {len(columns)} columns for --task {task or 'none'}, expected --task survival "
        "with event and time, regression or multilabel"
    )


def _exact(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _numbered(column: list[str]) -> np.ndarray:
    """Owners as integers where all are, so that 10 comes after 9."""
    try:
        numbers = np.array([int(cell) for cell in column], np.int64)
        same = all(str(number) == cell for number, cell in zip(numbers.tolist(), column, strict=True))
        return numbers if same else np.array(column)  # 01 is another one than 1
    except (ValueError, OverflowError):
        return np.array(column)


def split(share: float, owners: np.ndarray | None, rows: int, raw: Path) -> tuple[np.ndarray, np.ndarray]:
    """The rows for training and those for testing: of every owner this share, at least one of each if it has two."""
    random, held = np.random.RandomState(TEST_SEED), []
    groups = [np.arange(rows)] if owners is None else [np.flatnonzero(owners == owner) for owner in np.unique(owners)]
    for members in groups:
        count = min(max(1, round(share * len(members))), len(members) - 1)
        held.append(random.permutation(members)[:count])
    chosen = np.sort(np.concatenate(held))
    if not len(chosen):
        raise UserError(f"{raw}: no client has two rows, expected at least two of one, one of them for testing")
    return np.setdiff1d(np.arange(rows), chosen), chosen
