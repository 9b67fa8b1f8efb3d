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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..support import disk
from ..support.errors import UserError
from ..support.processes import is_alive
from .checksums import sha256
from .manifest import FORMAT, MANIFEST, RAW_PATH, TEST_FILE, VALIDATION_FILE, silo_file
from .sources import ImageSet

STAGING = ".unfinished-"
STALE_SECONDS = 24 * 3600
# Images copied at once from the data set into a file: bounds the memory needed in addition to the data set.
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


def write_all(
    folder: Path,
    images: ImageSet,
    owned: list[np.ndarray],
    silos: list[np.ndarray],
    held: np.ndarray,
    attributes: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    """Write every silo, the test set, and the ``held`` out images; returns the manifest's entries for them."""
    files = {}
    for silo, clients in enumerate(tqdm(silos, desc="writing", unit=" silos", disable=None)):
        indices = np.concatenate([owned[client] for client in clients])
        offsets = np.concatenate([[0], np.cumsum([len(owned[client]) for client in clients])])
        path = folder / silo_file(silo)
        extra = {"client_ids": clients.astype(np.int64), "offsets": offsets.astype(np.int64)}
        write_file(path, images.train_images, images.train_labels, indices, attributes, extra)
        files[path.name] = {**entry(path, len(indices)), "client_ids": clients.tolist()}
    path = folder / TEST_FILE
    write_file(path, images.test_images, images.test_labels, np.arange(len(images.test_labels)), attributes, {})
    files[path.name] = entry(path, len(images.test_labels))
    if len(held):
        path = folder / VALIDATION_FILE
        write_file(path, images.train_images, images.train_labels, held, attributes, {})
        files[path.name] = entry(path, len(held))
    return files


def write_file(
    path: Path,
    images: np.ndarray,
    labels: np.ndarray,
    indices: np.ndarray,
    attributes: dict[str, Any],
    extra: dict[str, np.ndarray],
) -> None:
    # A fixed file format version and no time stamps: the same content gives the same bytes.
    with disk.new_hdf5(path, libver=("earliest", "v108")) as file:
        file.attrs.update(attributes)
        shape = (len(indices), *images.shape[1:])
        stored = file.create_dataset("images", shape, dtype=np.uint8, track_times=False)
        for part in _blocks(images, len(indices)):
            stored[part] = images[indices[part]]
        for name, values in {"labels": labels[indices].astype(np.int64), **extra}.items():
            file.create_dataset(name, data=values, track_times=False)


def client_checksum(images: ImageSet, indices: np.ndarray) -> str:
    """The sha256 of a client's labels and images: identifies its data, whichever silo has it."""
    digest = hashlib.sha256(images.train_labels[indices].astype("<i8").tobytes())
    for part in _blocks(images.train_images, len(indices)):
        digest.update(images.train_images[indices[part]].tobytes())
    return digest.hexdigest()


def _blocks(images: np.ndarray, count: int) -> Iterator[slice]:
    """Slices of ``count`` images that are copied at once."""
    block = max(1, BLOCK_BYTES // (images[0].nbytes or 1))
    return (slice(start, start + block) for start in range(0, count, block))


def entry(path: Path, images: int) -> dict[str, Any]:
    return {"sha256": sha256(path), "bytes": path.stat().st_size, "images": images}


def attributes_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The attributes of every shard file, taken from the manifest."""
    return {
        "format": FORMAT,
        "dataset": manifest["dataset"],
        "classes": manifest["classes"],
        "mean": np.array(manifest["mean"], dtype=np.float64),
        "std": np.array(manifest["std"], dtype=np.float64),
        "partition": json.dumps(manifest["partition"], sort_keys=True),
        "seed": manifest["seed"],
        **{name: manifest[name] for name in ("validation",) if name in manifest},
    }


def publish(folder: Path, out: Path, names: list[str]) -> None:
    """Move finished files into place in this order, the manifest last; those of an earlier preparation are removed."""
    for name in names:
        _flush_to_disk(folder / name)
    (out / MANIFEST).unlink(missing_ok=True)
    for path in [*out.glob("silo_*.h5"), *out.glob(VALIDATION_FILE), *out.glob(RAW_PATH)]:
        if path.name not in names:
            path.unlink()
    for name in names:
        os.replace(folder / name, out / name)


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
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
    (folder / MANIFEST).write_text("{\n" + ",\n".join(lines) + "\n}\n")
