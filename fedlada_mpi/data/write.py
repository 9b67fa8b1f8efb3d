"""Writing shards so that a directory holds either all of them or none.

Files are written to a separate folder inside the target and renamed into place once all are
complete, the manifest last. A preparation that was killed leaves only that folder behind, which the
next one removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from tqdm import tqdm

from ..support import disk
from ..support.errors import UserError
from ..support.processes import is_alive
from .checksums import sha256
from .manifest import MANIFEST, RAW_PATH, TEST_FILE, VALIDATION_FILE, contents_digest, silo_file
from .rows import Inputs, Ragged, Rows, named, take_rows, values_of
from .sources.base import ArraySet, ImageSet

if TYPE_CHECKING:
    import h5py

Chosen: TypeAlias = tuple[Inputs, np.ndarray, np.ndarray]  # inputs, targets, and which of their rows
STAGING = ".unfinished-"
STALE_SECONDS = 24 * 3600
# Rows copied at once from the data set into a file: bounds the memory needed in addition to the data set.
BLOCK_BYTES = 32 << 20


@contextlib.contextmanager
def staging(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A new folder inside ``out``, always removed in the end; so is ``out`` if it was created here and is empty."""
    created = [path for path in (out, *out.parents) if not path.exists()]
    folder = out / f"{STAGING}{socket.gethostname()}-{os.getpid()}"
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
            remove_stale(out)
            free = shutil.disk_usage(out).free
            if free < needed_bytes:
                space = f"{free / 1e6:.0f} MB free, expected {needed_bytes / 1e6:.0f} MB"
                raise UserError(f"{out}: {space}: free some space, or choose another --out")
            folder.mkdir()
            reserve(folder / "reserved", needed_bytes)
            yield folder
        except OSError as error:
            reason = error.strerror or str(error).splitlines()[0]
            raise UserError(
                f"{out}: cannot be written ({reason}): check its permissions and space, or choose another --out"
            ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()


def reserve(path: Path, size: int) -> None:
    """Allocate the disk space that will be needed, and free it again.

    Quotas and limits show up here, before the minutes that writing may take.
    """
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
    path.unlink()


def remove_stale(out: Path) -> None:
    """Remove what a killed preparation left behind, but not the folder of one that is still running."""
    for folder in out.glob(f"{STAGING}*"):
        host, _, process = folder.name.removeprefix(STAGING).rpartition("-")
        alive = is_alive(int(process)) and int(process) != os.getpid()
        if (host == socket.gethostname() and not alive) or time.time() - folder.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Division:
    """Who has which rows of a data set: of the training rows those that are ``held`` out, and those of each client.

    ``tested``: the test rows of each client; None where they are nobody's. ``names`` are those of the clients, if they
    have any.
    """

    owned: list[np.ndarray]
    kept: np.ndarray
    held: np.ndarray
    tested: list[np.ndarray] | None = None
    names: list[str] = field(default_factory=list)

    @property
    def test_sizes(self) -> list[int]:
        return [0] * len(self.owned) if self.tested is None else [len(part) for part in self.tested]


def write_all(
    folder: Path,
    examples: ImageSet | ArraySet,
    division: Division,
    silos: list[np.ndarray],
    attributes: dict[str, Any],
    file: Callable[[int], str] = silo_file,
) -> dict[str, dict[str, Any]]:
    """Write every silo, the test set, and the held out rows; returns the manifest's entries for them.

    ``file``: the name of a silo's file.
    """
    files: dict[str, dict[str, Any]] = {}
    owned, tested = division.owned, division.tested
    kind = "images" if isinstance(examples, ImageSet) else "rows"
    for silo, clients in enumerate(tqdm(silos, desc="writing", unit=" silos", disable=None)):
        indices, offsets = _joined(owned, clients)
        path, test = folder / file(silo), None
        extra = {"client_ids": clients.astype(np.int64), "offsets": offsets}
        if tested is not None:
            test_indices, extra["test_offsets"] = _joined(tested, clients)
            test = (examples.test_inputs, examples.test_targets, test_indices)
        write_file(path, kind, (examples.inputs, examples.targets, indices), attributes, extra, test)
        files[path.name] = {**entry(path, len(indices), kind), "client_ids": clients.tolist()}
    everything = np.arange(len(examples.test_targets))
    sets = {TEST_FILE: (examples.test_inputs, examples.test_targets, everything)} if tested is None else {}
    sets |= {VALIDATION_FILE: (examples.inputs, examples.targets, division.held)} if len(division.held) else {}
    for name, rows in sets.items():
        write_file(folder / name, kind, rows, attributes, {})
        files[name] = entry(folder / name, len(rows[2]), kind)
    return files


def _joined(parts: list[np.ndarray], clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of these clients, one client after another, and where each begins and ends."""
    chosen = [parts[client] for client in clients]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in chosen])])
    return np.concatenate(chosen), offsets.astype(np.int64)


def write_file(
    path: Path,
    kind: str,
    rows: Chosen,
    attributes: dict[str, Any],
    extra: dict[str, np.ndarray],
    test: Chosen | None = None,
) -> None:
    """Some rows as one file: as ``images`` with labels, or as any arrays; those of a ``test`` have a group."""
    # A fixed file format version and no time stamps: the same content gives the same bytes.
    with disk.new_hdf5(path, libver=("earliest", "v108")) as file:
        file.attrs.update(attributes)
        _write_rows(file, kind, *rows)
        _write_small(file, extra)
        if test is not None:
            _write_rows(file.create_group("test"), kind, *test)


def _write_rows(file: h5py.Group, kind: str, inputs: Inputs, targets: np.ndarray, indices: np.ndarray) -> None:
    if kind == "images":
        _write_array(file, "images", named(inputs)[""], indices)
        _write_small(file, {"labels": targets[indices].astype(np.int64)})
        return
    for name, array in named(inputs).items():
        path = f"inputs/{name}" if name else "inputs"
        if isinstance(array, Ragged):
            rows = take_rows(array, indices)
            assert isinstance(rows, Ragged)
            _write_small(file, {f"{path}/values": rows.values, f"{path}/starts": rows.starts})
        else:
            _write_array(file, path, array, indices)
    _write_array(file, "targets", targets, indices)


def _write_array(file: h5py.Group, name: str, array: Rows, indices: np.ndarray) -> None:
    assert isinstance(array, np.ndarray)
    stored = file.create_dataset(name, (len(indices), *array.shape[1:]), dtype=array.dtype, track_times=False)
    for part in _blocks(array, len(indices)):
        stored[part] = array[indices[part]]


def _write_small(file: h5py.Group, arrays: dict[str, np.ndarray]) -> None:
    for name, values in arrays.items():
        file.create_dataset(name, data=values, track_times=False)


def client_checksums(examples: ImageSet | ArraySet, division: Division) -> list[str]:
    """The sha256 of each client's data: identifies it, whichever silo has it."""
    if isinstance(examples, ImageSet):
        return [client_checksum(examples, part) for part in division.owned]
    tested = division.tested or [np.arange(0)] * len(division.owned)
    sums = []
    for own, test in zip(division.owned, tested, strict=True):
        digest = hashlib.sha256()
        _update(digest, examples.inputs, examples.targets, own)
        _update(digest, examples.test_inputs, examples.test_targets, test)
        sums.append(digest.hexdigest())
    return sums


def _update(digest: hashlib._Hash, inputs: Inputs, targets: np.ndarray, indices: np.ndarray) -> None:
    digest.update(len(indices).to_bytes(8, "little"))
    for array in (targets, *named(inputs).values()):
        for part in _blocks(values_of(array), len(indices)):
            rows = take_rows(array, indices[part])
            if isinstance(rows, Ragged):
                digest.update(np.diff(rows.starts).astype("<i8").tobytes())
            digest.update(values_of(rows).tobytes())


def client_checksum(images: ImageSet, indices: np.ndarray) -> str:
    """The sha256 of a client's labels and images."""
    digest = hashlib.sha256(images.train_labels[indices].astype("<i8").tobytes())
    for part in _blocks(images.train_images, len(indices)):
        digest.update(images.train_images[indices[part]].tobytes())
    return digest.hexdigest()


def _blocks(array: np.ndarray, count: int) -> Iterator[slice]:
    """Slices of ``count`` rows that are copied at once."""
    block = max(1, BLOCK_BYTES // (array[:1].nbytes or 1))
    return (slice(start, start + block) for start in range(0, count, block))


def entry(path: Path, rows: int, kind: str) -> dict[str, Any]:
    return {"sha256": sha256(path), "bytes": path.stat().st_size, kind: rows}


def attributes_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The attributes of every shard file, taken from the manifest."""
    about: dict[str, Any] = {"contents": contents_digest(manifest)}
    if manifest["format"] == 1:
        about = {"classes": manifest["classes"]}
        about |= {name: np.array(manifest[name], dtype=np.float64) for name in ("mean", "std")}
    return {
        "format": manifest["format"],
        "dataset": manifest["dataset"],
        **about,
        "partition": json.dumps(manifest["partition"], sort_keys=True),
        "seed": manifest["seed"],
        **{name: manifest[name] for name in ("validation",) if name in manifest},
    }


def publish(folder: Path, out: Path, names: list[str]) -> None:
    """Move finished files into place in this order, the manifest last; those of an earlier preparation are removed."""
    for name in names:
        _flush_to_disk(folder / name)
    (out / names[-1]).unlink(missing_ok=True)
    for path in [*out.glob("silo_*.h5"), *(out / name for name in (TEST_FILE, VALIDATION_FILE, RAW_PATH))]:
        if path.name not in names:
            path.unlink(missing_ok=True)
    for name in names:
        os.replace(folder / name, out / name)


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_manifest(folder: Path, manifest: dict[str, Any], name: str = MANIFEST) -> None:
    """JSON with one line per field, client and file, so that it can be read and compared."""
    lines = []
    for key, value in manifest.items():
        if key == "counts":
            rows = ",\n    ".join(json.dumps(row) for row in value)
            lines.append(f'  "counts": [\n    {rows}\n  ]')
        elif key == "files":
            rows = ",\n    ".join(f"{json.dumps(name)}: {json.dumps(file)}" for name, file in value.items())
            lines.append(f'  "files": {{\n    {rows}\n  }}')
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    (folder / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")
