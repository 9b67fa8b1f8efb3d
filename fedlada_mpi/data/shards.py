"""Reading shards, as ``python -m data_prep`` writes them: one HDF5 file per silo, a test file and a manifest.

    manifest = read_manifest("data/cifar10")
    shard = read_clients(manifest, [3, 4])
    rows_of_first_client = shard.inputs[shard.offsets[0] : shard.offsets[1]]

Every rank opens files independently and reads its clients' part of them; parallel HDF5 is not needed. A file is read
only if it is the one that was written: its checksum comes first, so that HDF5 never parses a damaged file, and then all
that is read of it is compared with the manifest.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import h5py
import numpy as np

from ..support.errors import UserError, first_line
from ..support.processes import available_memory
from .checksums import first_wrong
from .manifest import IGNORED, MANIFEST, TEST_FILE, Manifest, Stored, read_manifest
from .rows import Inputs, Ragged, Rows, is_finite, joined, named, padded, unnamed, values_of, with_values

__all__ = [
    "Manifest",
    "Shard",
    "map_clients",
    "padded_inputs",
    "read_clients",
    "read_manifest",
    "read_silos",
    "read_test",
]


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows of some clients, one client after another: client k is ``offsets[k]:offsets[k + 1]``.

    ``inputs`` are an array, ragged rows, or several of these by name; ``padded_inputs`` makes arrays of them. ``test``
    has the clients' own test rows, where the data has such.
    """

    inputs: Inputs
    targets: np.ndarray
    client_ids: np.ndarray
    offsets: np.ndarray
    test: Shard | None = None


def read_silos(manifest: Manifest, silos: Sequence[int], verify: bool = True) -> Shard:
    """All clients of ``silos``, in that order; ``verify`` compares checksums first."""
    for silo in silos:
        if not 0 <= silo < manifest.silos:
            raise UserError(f"{manifest.root}: no silo {silo}, expected 0 to {manifest.silos - 1}")
    return read_clients(manifest, [client for silo in silos for client in manifest.client_ids[silo]], verify)


def read_clients(manifest: Manifest, clients: Sequence[int] | np.ndarray, verify: bool = True) -> Shard:
    """The data of ``clients``, in that order, read straight into one array; ``verify`` compares checksums first."""
    ids = np.asarray(clients, np.int64)
    check_files(manifest, files_of(manifest, ids), verify)
    return _read_clients(manifest, ids, _TO_MEMORY)


def map_clients(manifest: Manifest, clients: Sequence[int] | np.ndarray, verify: bool = True) -> list[Shard]:
    """The data of ``clients``, in that order, left in the files: arrays of a shard are mapped from a single file."""
    ids = np.asarray(clients, np.int64)
    check_files(manifest, files_of(manifest, ids), verify)
    silo_of, place_of = manifest.places
    parts = _runs(silo_of[ids], place_of[ids]) or [(0, 0)]
    return [_read_clients(manifest, ids[first:last], _IN_FILE) for first, last in parts]


def _read_clients(manifest: Manifest, ids: np.ndarray, access: _Access) -> Shard:
    silo_of, place_of = manifest.places
    train = _Part(manifest, ids, manifest.sizes, "", access)
    test = _Part(manifest, ids, manifest.test_sizes, "test", access) if manifest.own_tests else None
    for first, last in _runs(silo_of[ids], place_of[ids]):
        silo, place = int(silo_of[ids[first]]), int(place_of[ids[first]])
        theirs = manifest.client_ids[silo]
        with _opened(manifest, manifest.file(silo)) as file:
            _expect(file, "client_ids", theirs)
            for part in filter(None, (train, test)):
                part.read(file, first, last, theirs, place)
    return replace(train.shard(), test=None if test is None else test.shard())


class _Part:
    """The training rows, or the test rows, of some clients."""

    def __init__(self, manifest: Manifest, ids: np.ndarray, sizes: np.ndarray, group: str, access: _Access):
        self.manifest, self.ids, self.sizes, self.group = manifest, ids, sizes, group
        self.offsets = np.concatenate([[0], np.cumsum(sizes[ids])]).astype(np.int64)
        self.rows = _Arrays(manifest, int(self.offsets[-1]), access, group)

    def read(self, file: h5py.h5f.FileID, first: int, last: int, theirs: np.ndarray, place: int) -> None:
        """The rows of the clients from ``first`` to ``last``, which begin at ``place`` of the file's clients."""
        ends = np.concatenate([[0], np.cumsum(self.sizes[theirs])]).astype(np.int64)
        _expect(file, "test_offsets" if self.group else "offsets", ends)
        mine = slice(int(self.offsets[first]), int(self.offsets[last]))
        counts = None if self.group else self.manifest.counts[self.ids[first:last]]
        self.rows.read(file, mine, int(ends[place]), int(ends[-1]), counts)

    def shard(self) -> Shard:
        return Shard(self.rows.inputs, self.rows.targets, self.ids, self.offsets)


class _Arrays:
    """Rows of all arrays, in memory that is taken once, or left in a file; ragged ones are joined in the end."""

    def __init__(self, manifest: Manifest, count: int, access: _Access, group: str = ""):
        self.manifest, self.access, prefix = manifest, access, f"{group}/" if group else ""
        single, self.target = ("images", "labels") if manifest.format == 1 else ("inputs", "targets")
        self.target = prefix + self.target
        self.paths = {name: prefix + (f"{single}/{name}" if name else single) for name in manifest.arrays}
        self.dense: dict[str, np.ndarray] = {}
        self.ragged: dict[str, list[Rows]] = {}
        for name, stored in manifest.arrays.items():
            if stored.ragged:
                self.ragged[name] = []
            else:
                self.dense[name] = access.room((count, *stored.shape), stored.dtype)
        self.targets = access.room((count, *manifest.targets.shape), manifest.targets.dtype)

    def read(self, file: h5py.h5f.FileID, mine: slice, first: int, rows: int, counts: np.ndarray | None = None) -> None:
        """Fill the rows ``mine`` from row ``first`` of a file on that has so many ``rows``."""
        for name, stored in self.manifest.arrays.items():
            if stored.ragged:
                count = mine.stop - mine.start
                self.ragged[name].append(_read_ragged(file, self.paths[name], stored, first, count, rows, self.access))
                _check_values(self.ragged[name][-1], self.paths[name], stored)
            else:
                self.dense[name] = self._got(file, self.paths[name], self.dense[name], mine, first, rows)
                _check_values(self.dense[name][mine], self.paths[name], stored)
        self.targets = self._got(file, self.target, self.targets, mine, first, rows)
        _check_targets(self.targets[mine], self.manifest, counts)

    def _got(
        self, file: h5py.h5f.FileID, name: str, room: np.ndarray, mine: slice, first: int, rows: int
    ) -> np.ndarray:
        """All rows, those of ``mine`` from the file; where these are all, they may be elsewhere than in the room."""
        found = self.access.rows(file, name, room[mine], first, rows)
        return found if len(found) == len(room) else room

    @property
    def inputs(self) -> Inputs:
        joint = {name: joined(parts or [self._no_rows(name)]) for name, parts in self.ragged.items()}
        return unnamed({name: joint[name] if name in joint else self.dense[name] for name in self.manifest.arrays})

    def _no_rows(self, name: str) -> Ragged:
        stored = self.manifest.arrays[name]
        return Ragged(np.empty((0, *stored.shape[1:]), stored.dtype), np.zeros(1, np.int64))


def padded_inputs(
    stored_as: Mapping[str, Stored], inputs: Inputs, normalise: bool = True
) -> np.ndarray | dict[str, np.ndarray]:
    """Inputs as models get them, but for images: ragged rows filled up with zeros, what has a mean normalised."""
    arrays = {}
    for name, array in named(inputs).items():
        stored = stored_as[name]
        if stored.mean and normalise:
            wide = values_of(array).astype(np.float64)
            wide -= np.array(stored.mean)
            wide /= np.array(stored.std)
            values = wide.astype(stored.dtype if stored.dtype.startswith("float") else np.float32)
            array = with_values(array, values)
        if isinstance(array, Ragged):
            rows, width = len(array.starts) - 1, stored.shape[0]
            needed = rows * math.prod(stored.shape) * array.values.itemsize
            if needed > available_memory():
                what = f"{needed / 1e9:,.1f} GB for {rows} rows, all as long as the longest of {width}"
                raise UserError(f"{what}, are more than the memory that is free: cut the longest rows")
            array = padded(array, width)
        arrays[name] = array
    return arrays if isinstance(inputs, dict) else arrays[""]


def files_of(manifest: Manifest, clients: np.ndarray) -> list[str]:
    """The files that hold ``clients``, each once."""
    return [manifest.file(int(silo)) for silo in np.unique(manifest.places[0][clients])]


def _runs(silos: np.ndarray, places: np.ndarray) -> list[tuple[int, int]]:
    """Clients that follow one another in one file: where each run of them begins and ends."""
    breaks = np.flatnonzero((np.diff(silos) != 0) | (np.diff(places) != 1)) + 1
    ends = [*breaks.tolist(), len(silos)]
    return list(zip([0, *ends[:-1]], ends, strict=True)) if len(silos) else []


def read_test(
    manifest: Manifest, verify: bool = True, name: str = TEST_FILE, mapped: bool = False
) -> tuple[Inputs, np.ndarray] | None:
    """Inputs and targets of the test set, or of the validation set by the ``name`` of its file.

    None where there is no such file: the clients have test rows of their own. ``mapped``: left in the file.
    """
    if name not in manifest.files:
        return None
    check_files(manifest, [name], verify)
    count = manifest.rows(name)
    rows = _Arrays(manifest, count, _IN_FILE if mapped else _TO_MEMORY)
    with _opened(manifest, name) as file:
        rows.read(file, slice(0, count), 0, count)
    return rows.inputs, rows.targets


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
    if (version := attributes["format"]) != manifest.format:
        raise ValueError(f"format {version}, expected format {manifest.format}")
    about = ("classes", "mean", "std") if manifest.format == 1 else ("contents",)
    for name in ("dataset", "seed", *about, *(["validation"] if manifest.validation else [])):
        if not np.array_equal(attributes[name], getattr(manifest, name)):
            raise ValueError(f"{name} {attributes[name]}, but {getattr(manifest, name)} in {MANIFEST}")
    if json.loads(attributes["partition"]) != manifest.partition:
        raise ValueError(f"partition {attributes['partition']}, but {json.dumps(manifest.partition)} in {MANIFEST}")


def _read(file: h5py.h5f.FileID, name: str, out: np.ndarray, first: int = 0, rows: int | None = None) -> np.ndarray:
    """Into ``out``."""
    dataset = _dataset(file, name, out, rows)
    if dataset.shape == out.shape and out.size:
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, out)
    elif out.size:
        part = dataset.get_space()
        part.select_hyperslab((first, *(0 for _ in out.shape[1:])), out.shape)
        dataset.read(h5py.h5s.create_simple(out.shape), part, out)
    return out


def _map(file: h5py.h5f.FileID, name: str, like: np.ndarray, first: int = 0, rows: int | None = None) -> np.ndarray:
    """Left in the file, whose pages are read when they are needed."""
    dataset = _dataset(file, name, like, rows)
    if not like.size:
        return like
    if (begin := dataset.get_offset()) is None:
        raise ValueError(f"{name!r} is not stored in one piece, as --data-on disk needs it")
    place = begin + first * math.prod(like.shape[1:]) * like.itemsize
    return np.asarray(np.memmap(os.fsdecode(file.name), like.dtype, "r", place, like.shape))


def _no_room(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array that only says what is wanted."""
    return np.broadcast_to(np.empty((), dtype), shape)


@dataclass(frozen=True)
class _Access:
    """How rows are got: ``room`` of a shape and type for them, and what ``rows`` makes of a dataset's.

    ``rows(file, name, room, first, rows)`` begins at row ``first``; the dataset is like the room, but has ``rows``.
    """

    room: Callable[[tuple[int, ...], str], np.ndarray]
    rows: Callable[[h5py.h5f.FileID, str, np.ndarray, int, int | None], np.ndarray]


_TO_MEMORY = _Access(np.empty, _read)
_IN_FILE = _Access(_no_room, _map)


def _dataset(file: h5py.h5f.FileID, name: str, like: np.ndarray, rows: int | None) -> h5py.h5d.DatasetID:
    dataset = h5py.h5d.open(file, name.encode())
    shape = like.shape if rows is None else (rows, *like.shape[1:])
    if dataset.shape != shape or dataset.dtype != like.dtype:
        actual, expected = f"{dataset.dtype} {list(dataset.shape)}", f"{like.dtype} {list(shape)}"
        raise ValueError(f"{name!r} is {actual}, expected {expected}")
    return dataset


def _read_ragged(
    file: h5py.h5f.FileID, name: str, stored: Stored, first: int, count: int, rows: int, access: _Access
) -> Ragged:
    """``count`` rows from row ``first`` on of a ragged array that has so many ``rows``."""
    starts = np.empty(rows + 1, np.int64)
    _read(file, f"{name}/starts", starts)
    values = h5py.h5d.open(file, f"{name}/values".encode())
    if len(values.shape) != len(stored.shape) or values.get_storage_size() > file.get_filesize():
        raise ValueError(f"'{name}/values' is {values.dtype} {list(values.shape)}")
    lengths = np.diff(starts)
    if starts[0] != 0 or lengths.min(initial=0) < 0 or starts[-1] != values.shape[0]:
        raise ValueError(f"'{name}/starts' do not ascend from 0 to {values.shape[0]}")
    if lengths.max(initial=0) > stored.shape[0]:
        raise ValueError(f"{name!r} has a row of {lengths.max()}, expected at most {stored.shape[0]}")
    # Of a file that was checked, each value has its bytes: what is not stored takes no memory either.
    if values.shape[0] * max(1, math.prod(stored.shape[1:])) * np.dtype(stored.dtype).itemsize > file.get_filesize():
        raise ValueError(f"'{name}/values' has {values.shape[0]} values, more than the file")
    mine = starts[first : first + count + 1]
    room = access.room((int(mine[-1] - mine[0]), *stored.shape[1:]), stored.dtype)
    return Ragged(access.rows(file, f"{name}/values", room, int(mine[0]), int(starts[-1])), mine - mine[0])


def _expect(file: h5py.h5f.FileID, name: str, expected: np.ndarray) -> None:
    actual = np.empty_like(expected)
    _read(file, name, actual)
    if not np.array_equal(actual, expected):
        raise ValueError(f"{name!r} are not those of {MANIFEST}")


def _check_values(array: Rows, name: str, stored: Stored) -> None:
    """Numbers are finite, and integers those that there are."""
    _check_finite(values_of(array), name)
    if stored.values:
        _check_range(values_of(array), 0, stored.values - 1, name)


def _check_targets(targets: np.ndarray, manifest: Manifest, counts: np.ndarray | None) -> None:
    if not targets.size:
        return
    if manifest.format == 1 or manifest.counts.size:
        _check_labels(targets, manifest.classes, counts)
        return
    _check_finite(targets, "targets")
    if manifest.task == "next-token" and manifest.classes:
        _check_range(targets, -1, manifest.classes - 1, "targets")
    if manifest.task == "segmentation" and manifest.classes:
        _check_range(targets[targets != IGNORED], 0, manifest.classes - 1, "targets")


def _check_finite(values: np.ndarray, name: str) -> None:
    """Raise ValueError where numbers are not finite."""
    if not is_finite(values):
        raise ValueError(f"{name!r} has numbers that are not finite")


def _check_range(values: np.ndarray, least: int, most: int, name: str) -> None:
    if values.size and (values.min() < least or values.max() > most):
        raise ValueError(f"{name!r} has {values.min()} to {values.max()}, expected {least} to {most}")


def _check_labels(labels: np.ndarray, classes: int, counts: np.ndarray | None = None) -> None:
    """Labels are those of the classes; with ``counts``, as many of each as every client, in turn, should have."""
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"labels {labels.min()} to {labels.max()}, expected 0 to {classes - 1}")
    if counts is not None:
        cells = np.repeat(np.arange(len(counts)) * classes, counts.sum(axis=1)) + labels
        if not np.array_equal(np.bincount(cells, minlength=counts.size), counts.ravel()):
            raise ValueError(f"its labels are not as often there as 'counts' in {MANIFEST} say")
