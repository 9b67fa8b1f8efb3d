"""Damage to a directory of shards, and what a reader makes of it. Used by the tests and by ``tests/campaigns``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedlada_mpi.data.rows import Ragged
from fedlada_mpi.data.shards import read_manifest, read_silos, read_test
from fedlada_mpi.support.errors import UserError

MANIFEST = "manifest.json"
# Values that a manifest must not have anywhere, or only in some places.
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**62, 2**63, 2**64, 10**30, -(10**30)),
    *(0.5, 1.0, -0.0, 1e308, float("nan"), float("inf"), "", "x", "1", "NaN", "é\n\0", "a" * 5000, "0" * 64),
    *([], {}, [[]], [0], [1, 2, 3], [[[[[[1]]]]]], {"a": []}, {"sha256": None}),
    *("../silo_0001.h5", "/etc/passwd", "silo_0002.h5", "test.h5", "pathological", "$(touch x)"),
)


def contents(directory: Path) -> dict[str, np.ndarray]:
    """Everything that a run takes from the shards, as arrays."""
    manifest = read_manifest(directory)
    shard = read_silos(manifest, range(manifest.silos))
    test = read_test(manifest)
    names = ("classes", "mean", "std", "sizes", "counts", "test_sizes", "task", "edges")
    settings = {name: np.array(getattr(manifest, name)) for name in names}
    settings["about"] = np.array(repr((manifest.inputs, manifest.targets, manifest.about())))
    found = {**_arrays("", vars(shard)), **settings}
    if shard.test is not None:
        found |= _arrays("own ", vars(shard.test))
    return found if test is None else {**found, **_arrays("test ", dict(zip(("inputs", "targets"), test, strict=True)))}


def _arrays(prefix: str, values: dict[str, Any]) -> dict[str, np.ndarray]:
    """All arrays of some rows, those of ragged ones and of several inputs, too."""
    found = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            found[prefix + name] = value
        elif isinstance(value, dict):
            found |= _arrays(f"{prefix}{name} ", value)
        elif isinstance(value, Ragged):
            found |= _arrays(f"{prefix}{name} ", vars(value))
    return found


def outcome(directory: Path, original: dict[str, np.ndarray]) -> str:
    """``refused`` in one line, or the data is ``same`` or ``different``; anything else is raised."""
    try:
        now = contents(directory)
    except UserError as error:
        return "refused" if is_one_line(error) else f"not one line: {error}"
    return "same" if all(np.array_equal(now[name], array) for name, array in original.items()) else "different"


def is_one_line(error: UserError) -> bool:
    return len(str(error).splitlines()) == 1 and len(str(error)) < 2000


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flip(content: bytes, at: random.Random) -> bytes:
    return flipped(content, at.randrange(8 * len(content)))


def truncate(content: bytes, at: random.Random) -> bytes:
    return content[: at.randrange(len(content))]


def splice(content: bytes, at: random.Random) -> bytes:
    """Some bytes removed and others inserted in their place; the length often stays the same."""
    start, removed = at.randrange(len(content)), at.randrange(1, 20)
    inserted = at.choice([removed, at.randrange(1, 20)])
    return content[:start] + at.randbytes(inserted) + content[start + removed :]


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (flip, truncate, splice)


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values in a JSON value, its own first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def edited(text: str, path: tuple[str | int, ...], value: Any, delete: bool = False) -> str:
    """The JSON text with the value at ``path`` replaced or deleted."""
    document = json.loads(text)
    if not path:
        return "" if delete else json.dumps(value)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    if delete:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return json.dumps(document)
