"""Reading shards, as ``python -m data_prep`` writes them: one HDF5 file per silo, a test file and a manifest.

    manifest = read_manifest("data/cifar10")
    shard = read_clients(manifest, [3, 4])
    images_of_first_client = shard.images[shard.offsets[0] : shard.offsets[1]]

Every rank opens files independently and reads its clients' part of them; parallel HDF5 is not needed. A file is read
only if it is the one that was written: its checksum comes first, so that HDF5 never parses a damaged file, and then all
that is read of it is compared with the manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import h5py
import numpy as np

from ..support.errors import UserError, first_line
from .checksums import first_wrong
from .manifest import FORMAT, MANIFEST, TEST_FILE, Manifest, read_manifest, silo_file

__all__ = ["Manifest", "Shard", "read_clients", "read_manifest", "read_silos", "read_test"]


@dataclass(frozen=True, eq=False)
class Shard:
    """Images of some clients, one client after another: client k is ``offsets[k]:offsets[k + 1]``."""

    images: np.ndarray
    labels: np.ndarray
    client_ids: np.ndarray
    offsets: np.ndarray


def read_silos(manifest: Manifest, silos: Sequence[int], verify: bool = True) -> Shard:
    """All clients of ``silos``, in that order; ``verify`` compares checksums first."""
    for silo in silos:
        if not 0 <= silo < manifest.silos:
            raise UserError(f"{manifest.root}: no silo {silo}, expected 0 to {manifest.silos - 1}")
    return read_clients(manifest, [client for silo in silos for client in manifest.client_ids[silo]], verify)


def read_clients(manifest: Manifest, clients: Sequence[int] | np.ndarray, verify: bool = True) -> Shard:
    """The data of ``clients``, in that order, read straight into one array; ``verify`` compares checksums first."""
    ids = np.asarray(clients, np.int64)
    silo_of, place_of = manifest.places
    runs = _runs(silo_of[ids], place_of[ids])
    check_files(manifest, files_of(manifest, ids), verify)
    offsets = np.concatenate([[0], np.cumsum(manifest.sizes[ids])]).astype(np.int64)
    images = np.empty((offsets[-1], *manifest.image_shape), dtype=np.uint8)
    labels = np.empty(offsets[-1], dtype=np.int64)
    for first, last in runs:
        mine = slice(offsets[first], offsets[last])
        silo, place = int(silo_of[ids[first]]), int(place_of[ids[first]])
        theirs = manifest.client_ids[silo]
        ends = np.concatenate([[0], np.cumsum(manifest.sizes[theirs])]).astype(np.int64)
        with _opened(manifest, silo_file(silo)) as file:
            for name, expected in (("client_ids", theirs), ("offsets", ends)):
                actual = np.empty_like(expected)
                _read(file, name, actual)
                if not np.array_equal(actual, expected):
                    raise ValueError(f"{name!r} are not those of {MANIFEST}")
            _read(file, "images", images[mine], int(ends[place]), int(ends[-1]))
            _read(file, "labels", labels[mine], int(ends[place]), int(ends[-1]))
            _check_labels(labels[mine], manifest.classes, manifest.counts[ids[first:last]])
    return Shard(images, labels, ids, offsets)


def files_of(manifest: Manifest, clients: np.ndarray) -> list[str]:
    """The files that hold ``clients``, each once."""
    return [silo_file(int(silo)) for silo in np.unique(manifest.places[0][clients])]


def _runs(silos: np.ndarray, places: np.ndarray) -> list[tuple[int, int]]:
    """Clients that follow one another in one file: where each run of them begins and ends."""
    breaks = np.flatnonzero((np.diff(silos) != 0) | (np.diff(places) != 1)) + 1
    ends = [*breaks.tolist(), len(silos)]
    return list(zip([0, *ends[:-1]], ends, strict=True)) if len(silos) else []


def read_test(manifest: Manifest, verify: bool = True, name: str = TEST_FILE) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the test set, or of the validation set by the ``name`` of its file."""
    check_files(manifest, [name], verify)
    images = np.empty((manifest.files[name]["images"], *manifest.image_shape), dtype=np.uint8)
    labels = np.empty(len(images), dtype=np.int64)
    with _opened(manifest, name) as file:
        _read(file, "images", images)
        _read(file, "labels", labels)
        _check_labels(labels, manifest.classes)
    return images, labels


def check_files(manifest: Manifest, names: Sequence[str], checksums: bool = True, trust_cache: bool = True) -> None:
    """Refuse files that are missing, or of another size or checksum than the manifest says."""
    wrong = None
    try:
        for name in names:
            path, expected = manifest.root / name, manifest.files[name]["bytes"]
            if not path.is_file():
                raise UserError(f"{path}: missing, or not a regular file: {_prepare_again(manifest)}")
            if (size := path.stat().st_size) != expected:
                raise UserError(f"{path}: got {size} bytes, expected {expected}: {_prepare_again(manifest)}")
        if checksums:
            sums = {manifest.root / name: manifest.files[name]["sha256"] for name in names}
            wrong = first_wrong(sums, trust_cache)
    except OSError as error:
        raise UserError(f"{error.filename or manifest.root}: cannot be read ({error.strerror or error})") from None
    if wrong:
        reason = f"its sha256 is not that of {MANIFEST}: the file was changed"
        raise UserError(f"{wrong}: {reason}: {_prepare_again(manifest)}")


def _prepare_again(manifest: Manifest) -> str:
    return f"prepare it again with {manifest.command}"


# Below, h5py's low-level calls: data goes from the file straight into its place in memory,
# and HDF5's own overhead stays small even for small files.
_ACCESS = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
_ACCESS.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
# Finished shards never change, and many parallel file systems offer no locks.
_ACCESS.set_file_locking(False, True)


@contextlib.contextmanager
def _opened(manifest: Manifest, name: str) -> Iterator[h5py.h5f.FileID]:
    """Open one file of the manifest; whatever does not fit in it is an error that names the file."""
    path = manifest.root / name
    try:
        file = h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, _ACCESS)
        try:
            _check_attributes(file, manifest)
            yield file
        finally:
            file.close()
    # h5py raises any of these on a file that is not as it expects.
    except (OSError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: not a shard of {MANIFEST} ({first_line(error)}): {_prepare_again(manifest)}"
        ) from None


def _check_attributes(file: h5py.h5f.FileID, manifest: Manifest) -> None:
    """The settings in the file must be those of the manifest: neither can be changed alone."""
    attributes = h5py.File(file).attrs
    if (version := attributes["format"]) != FORMAT:
        raise ValueError(f"format {version}, expected format {FORMAT}")
    for name in ("dataset", "classes", "seed", "mean", "std", *(["validation"] if manifest.validation else [])):
        if not np.array_equal(attributes[name], getattr(manifest, name)):
            raise ValueError(f"{name} {attributes[name]}, but {getattr(manifest, name)} in {MANIFEST}")
    if json.loads(attributes["partition"]) != manifest.partition:
        raise ValueError(f"partition {attributes['partition']}, but {json.dumps(manifest.partition)} in {MANIFEST}")


def _read(file: h5py.h5f.FileID, name: str, out: np.ndarray, first: int = 0, rows: int | None = None) -> None:
    """Fill ``out`` from row ``first`` of a dataset on, which has its type and shape, or ``rows`` rows."""
    dataset = h5py.h5d.open(file, name.encode())
    shape = out.shape if rows is None else (rows, *out.shape[1:])
    if dataset.shape != shape or dataset.dtype != out.dtype:
        actual, expected = f"{dataset.dtype} {list(dataset.shape)}", f"{out.dtype} {list(shape)}"
        raise ValueError(f"{name!r} is {actual}, expected {expected}")
    if out.shape == shape:
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, out)
        return
    part = dataset.get_space()
    part.select_hyperslab((first, *(0 for _ in out.shape[1:])), out.shape)
    dataset.read(h5py.h5s.create_simple(out.shape), part, out)


def _check_labels(labels: np.ndarray, classes: int, counts: np.ndarray | None = None) -> None:
    """Labels are those of the classes; with ``counts``, as many of each as every client, in turn, should have."""
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"labels {labels.min()} to {labels.max()}, expected 0 to {classes - 1}")
    if counts is not None:
        cells = np.repeat(np.arange(len(counts)) * classes, counts.sum(axis=1)) + labels
        if not np.array_equal(np.bincount(cells, minlength=counts.size), counts.ravel()):
            raise ValueError(f"its labels are not as often there as 'counts' in {MANIFEST} say")
