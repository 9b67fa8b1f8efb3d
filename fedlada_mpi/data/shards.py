"""Reading shards, as ``python -m data_prep`` writes them: one HDF5 file per silo, a test file and a manifest.

    manifest = read_manifest("data/cifar10")
    shard = read_silos(manifest, [0, 1])
    images_of_first_client = shard.images[shard.offsets[0] : shard.offsets[1]]

Every rank opens its own files independently; parallel HDF5 is not needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
TEST_FILE = "test.h5"
_PREPARE_AGAIN = ": run python -m data_prep again with --force"


@dataclass(frozen=True, eq=False)
class Manifest:
    """The contents of a directory of shards. Silos are numbered from 0 here, their files from 1."""

    root: Path
    dataset: str
    classes: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_shape: tuple[int, int, int]
    clients: int
    silos: int
    sizes: np.ndarray
    counts: np.ndarray
    client_ids: tuple[np.ndarray, ...]
    client_names: tuple[str, ...]
    partition: dict[str, Any]
    seed: int
    source: str
    files: dict[str, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Shard:
    """Images of some clients, one client after another: client k is ``offsets[k]:offsets[k + 1]``."""

    images: np.ndarray
    labels: np.ndarray
    client_ids: np.ndarray
    offsets: np.ndarray


def silo_file(silo: int) -> str:
    return f"silo_{silo + 1:04d}.h5"


def read_manifest(directory: str | os.PathLike) -> Manifest:
    path = Path(directory) / MANIFEST
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise UserError(
            f"no {MANIFEST} in {directory}: prepare shards with python -m data_prep --out {directory}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        data = json.loads(text)
        check_format(data["format"], path)
        counts = np.array(data["counts"], dtype=np.int64).reshape(data["clients"], data["classes"])
        return Manifest(
            root=path.parent,
            dataset=data["dataset"],
            classes=data["classes"],
            class_names=tuple(data["class_names"]),
            mean=tuple(data["mean"]),
            std=tuple(data["std"]),
            image_shape=tuple(data["image_shape"]),
            clients=data["clients"],
            silos=data["silos"],
            sizes=counts.sum(axis=1),
            counts=counts,
            client_ids=tuple(
                np.array(data["files"][silo_file(s)]["client_ids"], np.int64) for s in range(data["silos"])
            ),
            client_names=tuple(data["client_names"]),
            partition=data["partition"],
            seed=data["seed"],
            source=data["source"],
            files=data["files"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a manifest of shards ({error!r}){_PREPARE_AGAIN}") from None


def read_silos(manifest: Manifest, silos: Sequence[int], verify: bool = False) -> Shard:
    """The shards of ``silos``, in that order, read straight into one array; ``verify`` compares checksums first."""
    for silo in silos:
        if not 0 <= silo < manifest.silos:
            raise UserError(f"{manifest.root}: no silo {silo}, expected 0 to {manifest.silos - 1}")
    client_ids = np.concatenate([np.empty(0, np.int64), *(manifest.client_ids[silo] for silo in silos)])
    offsets = np.concatenate([[0], np.cumsum(manifest.sizes[client_ids])]).astype(np.int64)
    images = np.empty((offsets[-1], *manifest.image_shape), dtype=np.uint8)
    labels = np.empty(offsets[-1], dtype=np.int64)
    start = 0
    for silo in silos:
        expected = manifest.client_ids[silo]
        stop = start + int(manifest.sizes[expected].sum())
        with _opened(manifest, silo_file(silo), verify) as file:
            _read(file, "images", images[start:stop])
            _read(file, "labels", labels[start:stop])
            if verify:
                _check_clients(file, expected, manifest.sizes[expected])
        start = stop
    return Shard(images, labels, client_ids, offsets)


def read_test(manifest: Manifest, verify: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the test set."""
    images = np.empty((manifest.files[TEST_FILE]["images"], *manifest.image_shape), dtype=np.uint8)
    labels = np.empty(len(images), dtype=np.int64)
    with _opened(manifest, TEST_FILE, verify) as file:
        _read(file, "images", images)
        _read(file, "labels", labels)
    return images, labels


# Below, h5py's low-level calls: whole datasets go from the file straight into their place in memory,
# and HDF5's own overhead stays small even for small files.
_ACCESS = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
_ACCESS.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
# Finished shards never change, and many parallel file systems offer no locks.
_ACCESS.set_file_locking(False, True)


@contextlib.contextmanager
def _opened(manifest: Manifest, name: str, verify: bool) -> Iterator[h5py.h5f.FileID]:
    """Open one file of the manifest after checking what is cheap: its format version and size."""
    path = manifest.root / name
    entry = manifest.files[name]
    if verify and path.exists() and path.stat().st_size == entry["bytes"] and sha256(path) != entry["sha256"]:
        raise UserError(f"{path}: its sha256 is not that of {MANIFEST}: the file was changed{_PREPARE_AGAIN}")
    try:
        file = h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, _ACCESS)
    except OSError as error:
        length = f", {path.stat().st_size} bytes" if path.exists() else ""
        reason = f"cannot be opened as HDF5 ({_first_line(error)}{length})"
        raise UserError(f"{path}: {reason}, expected a shard of {entry['bytes']} bytes{_PREPARE_AGAIN}") from None
    try:
        # Before the size, because that differs, too, in a shard of another version.
        check_format(_format_of(file), path)
        if (size := path.stat().st_size) != entry["bytes"]:
            raise UserError(f"{path}: got {size} bytes, expected {entry['bytes']}{_PREPARE_AGAIN}")
        yield file
    finally:
        file.close()


def _format_of(file: h5py.h5f.FileID) -> int | None:
    try:
        version = np.empty((), dtype=np.int64)
        h5py.h5a.open(file, b"format").read(version)
        return int(version)
    except (KeyError, TypeError, OSError):
        return None


def _read(file: h5py.h5f.FileID, name: str, out: np.ndarray) -> None:
    """Fill ``out`` with the whole of one dataset, which must have its shape and type."""
    try:
        dataset = h5py.h5d.open(file, name.encode())
    except KeyError:
        raise UserError(f"{_name(file)}: {name!r} is missing{_PREPARE_AGAIN}") from None
    if dataset.shape != out.shape or dataset.dtype != out.dtype:
        actual, expected = f"{dataset.dtype} {list(dataset.shape)}", f"{out.dtype} {list(out.shape)}"
        raise UserError(f"{_name(file)}: {name!r} is {actual}, expected {expected}{_PREPARE_AGAIN}")
    try:
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, out)
    except OSError as error:
        raise UserError(f"{_name(file)}: {name!r} cannot be read ({_first_line(error)}){_PREPARE_AGAIN}") from None


def _check_clients(file: h5py.h5f.FileID, expected: np.ndarray, sizes: np.ndarray) -> None:
    ids, ends = np.empty_like(expected), np.empty(len(expected) + 1, dtype=np.int64)
    _read(file, "client_ids", ids)
    _read(file, "offsets", ends)
    if (ids != expected).any() or (np.diff(ends) != sizes).any():
        raise UserError(f"{_name(file)}: its clients are not those of {MANIFEST}{_PREPARE_AGAIN}")


def _name(file: h5py.h5f.FileID) -> str:
    return os.fsdecode(file.name)


def check_format(version: object, path: Path) -> None:
    if version != FORMAT:
        raise UserError(f"{path}: shards of format {version}, expected format {FORMAT}{_PREPARE_AGAIN}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
