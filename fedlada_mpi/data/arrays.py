"""Data that is given from Python as arrays: checked, and written once as shards, for all ranks and for later runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..settings import SETTINGS, check_value, coerce
from ..support.errors import UserError, first_line, shortened
from .datasets import PREPARING
from .manifest import ARRAYS, MANIFEST, data_root, read_manifest
from .partition import hold_out
from .prepare import complete, describe, write_shards
from .settings import PrepareSettings
from .sources import ImageSet
from .sources.base import check
from .sources.npz import channels_last

_READ = ("data_dir", "validation", "partition_seed")  # settings of a run that its shards depend on
SILOS = 64  # files of training images, whose checksums are computed side by side


@dataclass(eq=False)
class Data:
    """Images, labels, and which of the training images each client has.

    Images are uint8 ``[n, rows, columns, channels]`` with 1 or 3 channels, or ``[n, rows, columns]``; labels are
    integers from 0. ``clients`` has one sequence of indices into the training images per client. ``mean`` and ``std``,
    per channel and of pixels between 0 and 1, are by default those of the training images. Arrays are what
    ``numpy.asarray`` takes. Raises ``UserError`` where they do not fit together.
    """

    train_images: Any
    train_labels: Any
    clients: Sequence[Any]
    test_images: Any
    test_labels: Any
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    class_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("train_images", "train_labels", "test_images", "test_labels"):
            setattr(self, name, array(getattr(self, name), f"data: {name}"))
        self.train_images, self.test_images = map(channels_last, (self.train_images, self.test_images))
        check(self.images, ARRAYS, "data")
        self.train_labels, self.test_labels = (a.astype(np.int64) for a in (self.train_labels, self.test_labels))
        if isinstance(self.clients, (str, bytes, Mapping)) or not hasattr(self.clients, "__len__"):
            raise UserError(
                f"data: got clients {shortened(self.clients)}, expected a list of index arrays, one per client"
            )
        if not len(self.clients):
            raise UserError("data: got no clients, expected at least one array of indices")
        self.clients = [self._indices(client, indices) for client, indices in enumerate(self.clients)]
        channels = self.train_images.shape[3]
        self.mean, self.std = (self._per_channel(name, channels) for name in ("mean", "std"))

    @property
    def images(self) -> ImageSet:
        labels, names = self.train_labels, self.class_names
        if names is None:
            # No more classes than images, whatever the labels are: each must have some.
            largest = int(labels.max()) if labels.ndim == 1 and labels.size and labels.dtype.kind in "iu" else 0
            names = [str(label) for label in range(min(largest + 1, max(1, len(labels))))]
        return ImageSet(self.train_images, labels, self.test_images, self.test_labels, [str(name) for name in names])

    def _indices(self, client: int, given: object) -> np.ndarray:
        what, count = f"data: client {client}", len(self.train_labels)
        indices = array(given, what)
        if indices.size == 0:
            raise UserError(f"{what} has no images, expected at least one index: leave the client out")
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            shape = list(indices.shape)
            raise UserError(f"{what}: got {indices.dtype} of shape {shape}, expected a list of integer indices")
        if indices.min() < 0 or indices.max() >= count:
            odd = indices.min() if indices.min() < 0 else indices.max()
            raise UserError(f"{what}: got index {odd}, expected 0 to {count - 1}, for {count} training images")
        return indices.astype(np.int64)

    def _per_channel(self, name: str, channels: int) -> tuple[float, ...] | None:
        given = getattr(self, name)
        if given is None:
            return None
        values = np.atleast_1d(array(given, f"data: {name}"))
        if values.shape != (channels,) or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
            raise UserError(f"data: {name}: got {shortened(given)}, expected {channels} numbers, one per channel")
        if name == "std" and values.min() <= 0:
            raise UserError(f"data: std: got {shortened(given)}, expected more than 0")
        return tuple(map(float, values))

    @property
    def digest(self) -> str:
        """Of all that the shards contain."""
        value = hashlib.sha256(repr((self.mean, self.std, self.images.class_names)).encode())
        parts = (self.train_images, self.train_labels, self.test_images, self.test_labels, *self.clients)
        for part in parts:
            value.update(repr((part.dtype.str, part.shape)).encode())
            value.update(np.ascontiguousarray(part).data)
        return value.hexdigest()


def array(given: object, what: str) -> np.ndarray:
    """The value as an array; a tensor may be on a GPU or have a gradient."""
    try:
        return np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{what}: got {type(given).__name__}, expected an array ({first_line(error)})") from None


def shards(data: Data, settings: Mapping[str, Any]) -> str:
    """The directory of the data's shards, for the setting ``dataset``; the same arrays always have the same one.

    Where the settings ask for a validation set, it is drawn from the clients' images.
    """
    if not isinstance(data, Data):
        raise UserError(f"data: got {shortened(data)}, expected fedlada_mpi.Data(train_images, train_labels, ...)")
    if "dataset" in settings:
        raise UserError(f"data and dataset contradict each other: got dataset {shortened(settings['dataset'])}, too")
    asked = {name: coerce(SETTINGS[name], settings.get(name, SETTINGS[name].default)) for name in _READ}
    for name, value in asked.items():
        check_value(SETTINGS[name], value, name)
    share, seed = asked["validation"], asked["partition_seed"] if asked["validation"] else PrepareSettings.seed
    root, digest = data_root(asked["data_dir"]), data.digest
    held_out = f"-validation{share!r}-seed{seed}" if share else ""
    out = root / f"{ARRAYS}-{digest[:12]}{held_out}"
    with PREPARING:
        if not (out / MANIFEST).is_file() or not complete(read_manifest(out)):
            _write(data, digest, out, share, seed)
    return str(out)


def _write(data: Data, digest: str, out: Path, validation: float, seed: int) -> None:
    images, trained_on = data.images, np.unique(np.concatenate(data.clients))
    held = trained_on[hold_out(validation, images.train_labels[trained_on], seed)[1]]
    owned = [indices[~np.isin(indices, held)] for indices in data.clients]
    if empty := [client for client, indices in enumerate(owned) if not len(indices)]:
        raise UserError(f"--validation: got {validation:g}, which leaves client {empty[0]} no image: give less")
    kept = np.setdiff1d(np.arange(len(images.train_labels)), held)
    settings = PrepareSettings(
        ARRAYS,
        out,
        clients=len(owned),
        silos=min(SILOS, len(owned)),
        partition="natural",
        seed=seed,
        validation=validation,
    )
    manifest = describe(settings, digest, images, kept, owned)
    manifest |= {name: list(given) for name in ("mean", "std") if (given := getattr(data, name)) is not None}
    write_shards(out, manifest, images, owned, held)
