"""A folder of texts: each file is a client, its bytes are tokens, and its end is for testing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from ...support.errors import UserError
from ..manifest import as_text
from .base import ArraySet
from .bounds import check_memory, read_file

TEST_SHARE = 0.1  # of a file, its end
LENGTH = 80
VOCABULARY = 256
BYTES = 5  # of memory for each byte of text: the tokens and the targets, once for all files and once in rows


def load_text(raw: Path, workers: int = 1, length: int = LENGTH) -> ArraySet:
    """Rows of ``length`` bytes, whose targets are the bytes that follow; what does not fill a row is left out."""
    files = text_files(raw)
    check_memory(BYTES * sum(path.stat().st_size for path in files.values()), raw)
    train: list[tuple[np.ndarray, np.ndarray]] = []
    test: list[tuple[np.ndarray, np.ndarray]] = []
    for path in files.values():
        size = path.stat().st_size
        tokens = np.frombuffer(read_file(path, size), np.uint8)
        end = len(tokens) - round(TEST_SHARE * len(tokens))
        if end <= length:
            least = round(length / (1 - TEST_SHARE))
            raise UserError(
                f"{path}: {len(tokens)} bytes, expected more than {least} for rows of {length}: remove it, or give a "
                "smaller --length"
            )
        train.append(rows_of(tokens[:end], length))
        test.append(rows_of(tokens[end:], length))
    if not any(len(inputs) for inputs, _ in test):
        raise UserError(f"{raw}: the ends of the files are shorter than a row of {length}, expected one: --length 20")
    names = np.array([*files])
    owners, test_owners = (np.repeat(names, [len(inputs) for inputs, _ in part]) for part in (train, test))
    (inputs, targets), (test_inputs, test_targets) = (
        tuple(np.concatenate([pair[which] for pair in part]) for which in range(2)) for part in (train, test)
    )
    return ArraySet(
        inputs, targets, test_inputs, test_targets, owners, test_owners, task="next-token", tokens=VOCABULARY
    )


def rows_of(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in rows, and of each the one that follows; -1 where the text ends."""
    count = len(tokens) // length
    following = np.concatenate([tokens[1:].astype(np.int16), [-1]]).astype(np.int16)
    return tuple(part[: count * length].reshape(count, length) for part in (tokens, following))  # type: ignore[return-value]


def text_files(raw: Path) -> dict[str, Path]:
    """The files of the folder by the names of their clients: without the ending, where that is enough."""
    if not raw.is_dir():
        raise UserError(f"--raw: got {raw}, expected a folder of texts, one file for each client")
    paths = sorted(path for path in raw.iterdir() if not path.name.startswith("."))
    if odd := next((path for path in paths if not path.is_file()), None):
        raise UserError(f"{odd}: not a regular file, expected texts alone, one file for each client: remove it")
    if not paths:
        raise UserError(f"{raw}: no files, expected a text for each client")
    short = [path.stem for path in paths]
    names = short if len({*short}) == len(paths) else [path.name for path in paths]
    return {as_text(name): path for name, path in zip(names, paths, strict=True)}


def fingerprint(raw: Path) -> str:
    digest = hashlib.sha256()
    for path in text_files(raw).values():
        content = hashlib.sha256(read_file(path, path.stat().st_size)).hexdigest()
        digest.update(f"{path.name}\0{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
