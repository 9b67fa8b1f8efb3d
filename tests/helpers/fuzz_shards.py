"""Random damage to shards and edits of their manifests, for the tests of both formats."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from damage import MANIFEST, ODD_VALUES, contents, edited, outcome, places
from hypothesis import settings
from hypothesis import strategies as st

from fedlada_mpi.data.checksums import sha256
from fedlada_mpi.support.errors import UserError

FUZZ = settings(derandomize=True, deadline=None, max_examples=80, database=None)
json_values = st.recursive(
    st.one_of(st.sampled_from(ODD_VALUES), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


class Changed:
    """One file with other content, until the end of the block."""

    def __init__(self, path: Path, content: bytes | str):
        self.path, self.before = path, path.read_bytes()
        self.content = content.encode("utf8", "surrogatepass") if isinstance(content, str) else content

    def __enter__(self) -> None:
        self.path.write_bytes(self.content)

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(self.before)


def check_damaged(path: Path, original: dict[str, np.ndarray], damage: Callable[..., bytes], seed: int) -> None:
    """Shards with this file damaged are refused, or the same."""
    with Changed(path, damage(path.read_bytes(), random.Random(seed))):
        assert outcome(path.parent, original) in ("refused", "same")


def check_edited(shards: Path, original: dict[str, np.ndarray], number: int, value: Any, delete: bool) -> None:
    """So are those whose manifest has another value in one of its places, or none."""
    path = shards / MANIFEST
    text = path.read_text()
    paths = list(places(json.loads(text)))
    with Changed(path, edited(text, paths[number % len(paths)], value, delete)):
        assert outcome(shards, original) in ("refused", "same")


def refusal_of_edit(shards: Path, place: tuple, value: Any, message: str) -> str:
    """What is said of a manifest with this value, in one line."""
    path = shards / MANIFEST
    with Changed(path, edited(path.read_text(), place, value)), pytest.raises(UserError, match=message) as refused:
        contents(shards)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


def with_content(shards: Path, copy: Path, name: str, change: Callable[[h5py.File], None]) -> Path:
    """A copy with a file changed and its checksum made to fit, as by someone with a program of their own."""
    path = Path(shutil.copytree(shards, copy)) / name
    with h5py.File(path, "r+") as file:
        change(file)
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"][name] |= {"sha256": sha256(path), "bytes": path.stat().st_size}
    (copy / MANIFEST).write_text(json.dumps(manifest))
    return copy
