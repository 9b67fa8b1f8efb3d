"""Data that is given from Python as arrays: checked, and written once as shards, for all ranks and for later runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..settings import SETTINGS, check_value, coerce
from ..support.errors import UserError, shortened
from .datasets import PREPARING
from .given import alike, array, inputs_of, names_of, native, next_tokens, rows_of, stacked
from .manifest import ARRAYS, MANIFEST, NORMALISE, data_root, read_manifest
from .normalise import by_client
from .partition import hold_out, natural
from .prepare import Examples, complete, describe, simplest, strata_of, tests_of, write_shards
from .rows import (
    Inputs,
    Ragged,
    as_floats,
    has_floats,
    named,
)
from .settings import STRATA, PrepareSettings
from .sources import ArraySet, ImageSet
from .sources.base import check, check_arrays
from .sources.npz import channels_last, is_image, task_of
from .write import Division

_READ = ("data_dir", "validation", "partition_seed")  # settings of a run that its shards depend on
SILOS = 64  # files of training images, whose checksums are computed side by side


@dataclass(eq=False)
class Data:
    """Examples, and which of those for training each client has: any arrays, or images with a label each.

        Data(inputs=X, targets=y, clients=owner, test=(X1, y1))
        Data(train_images=..., train_labels=..., clients=..., test_images=..., test_labels=...)

    ``inputs``: an array ``[n, ...]`` of booleans, integers or floats; a list of arrays of any length; or several of
    these by the names of a model's keywords. ``targets``: ``[n, ...]``; left out, inputs are tokens and the next one is
    to be predicted. ``test``: inputs and targets, and the owner of each row where clients have test rows of their own.
    ``task``: what is learnt unless a run is told otherwise; by default what the type of the targets suggests.
    ``normalise``: floats by the mean and the deviation of all training rows (``pooled``) or of each client's
    (``client``). Bytes ``[n, rows, columns, 1 or 3]`` are images, unless ``image`` is False.

    Images are uint8 ``[n, rows, columns, channels]`` with 1 or 3 channels, or ``[n, rows, columns]``; labels are
    integers from 0. ``mean`` and ``std``, per channel and of pixels between 0 and 1, are by default those of the
    training images.

    ``clients`` has one sequence of indices into the training rows per client, or the owner of each row, a name or a
    number. Arrays are what ``numpy.asarray`` takes. Raises ``UserError`` where they do not fit together.
    """

    train_images: Any = None
    train_labels: Any = None
    clients: Any = None
    test_images: Any = None
    test_labels: Any = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    class_names: Sequence[str] | None = None
    inputs: Any = None
    targets: Any = None
    test: Sequence[Any] | None = None
    task: str | None = None
    normalise: str | None = None
    image: bool | None = None

    def __post_init__(self) -> None:
        images = [name for name in _IMAGES if getattr(self, name) is not None]
        others = [name for name in _ARRAYS if getattr(self, name) is not None]
        if images and others:
            raise UserError(f"data: got {images[0]} and {others[0]}, expected images and labels, or inputs and targets")
        required = _IMAGES[:4] if images else _REQUIRED
        if missing := [name for name in required if getattr(self, name) is None]:
            expected = "Data(train_images=, ..., clients=)" if images else "Data(inputs=, targets=, clients=, test=)"
            raise UserError(f"data: got no {missing[0]}, expected {expected}")
        if self.clients is None:
            raise UserError("data: got no clients, expected the owner of each row, or a list of index arrays")
        if self.task is not None and not isinstance(self.task, str):
            got = shortened(self.task)
            raise UserError(f"data: task: got {got}, expected the name of one; a class is for train(task=...)")
        if isinstance(self.class_names, str) or (self.class_names is not None and not np.iterable(self.class_names)):
            raise UserError(f"data: class_names: got {shortened(self.class_names)}, expected a list of names")
        self.client_names: list[str] = []
        self.tested: list[np.ndarray] | None = None
        self.no_classes: UserError | None = None  # why targets that look like classes are none
        self.examples = self._array_set() if others else self._image_set()
        owners = self.examples.test_owners
        if isinstance(self.examples, ArraySet):
            checked = self._checked(replace(self.examples, test_owners=None))
            self.examples = simplest(checked) if owners is None else checked
        if isinstance(self.examples, ImageSet):
            check(self.examples, ARRAYS, "data")
        self.clients = self._divided(len(self.examples.targets))
        self.tested = None if owners is None else self._tests(owners)

    @classmethod
    def from_datasets(cls, train: Mapping[str, Any] | Sequence[Any], test: Any, **more: Any) -> Data:
        """Of a torch data set of pairs ``(x, y)`` for each client, by name or in a list.

        ``test``: a data set, or one for each of some clients by name. ``more`` are the other arguments of ``Data``.
        """
        if not isinstance(train, (Mapping, list, tuple)):
            got = shortened(train)
            raise UserError(f"data: got {got}, expected a data set for each client, by name or in a list")
        sets = dict(train) if isinstance(train, Mapping) else dict(enumerate(train))
        if not sets:
            raise UserError("data: got no training data sets, expected one for each client")
        inputs, targets, owners = stacked(sets, "training")
        if isinstance(test, Mapping):
            return cls(inputs=inputs, targets=targets, clients=owners, test=stacked(dict(test), "test"), **more)
        return cls(inputs=inputs, targets=targets, clients=owners, test=stacked({"": test}, "test")[:2], **more)

    def _checked(self, examples: ArraySet) -> ArraySet:
        """Integers that cannot be classes are numbers of a task that a run must name."""
        try:
            check_arrays(examples, "data")
        except UserError as error:
            if self.task or self.class_names or examples.task != "classification":
                raise
            examples = replace(examples, task="")
            check_arrays(examples, "data")
            self.no_classes = error
        return examples

    def _image_set(self) -> ImageSet:
        for name in _IMAGES[:4]:
            setattr(self, name, rows_of(getattr(self, name), f"data: {name}"))
        self.train_images, self.test_images = map(channels_last, (self.train_images, self.test_images))
        labels, names = self.train_labels, self.class_names
        if names is None:
            # No more classes than images, whatever the labels are: each must have some.
            largest = int(labels.max()) if labels.ndim == 1 and labels.size and labels.dtype.kind in "iu" else 0
            names = [str(label) for label in range(min(largest + 1, max(1, len(labels))))]
        given = ImageSet(self.train_images, labels, self.test_images, self.test_labels, [str(name) for name in names])
        check(given, ARRAYS, "data")
        self.train_labels, self.test_labels = (a.astype(np.int64) for a in (labels, self.test_labels))
        channels = self.train_images.shape[3]
        self.mean, self.std = (self._per_channel(name, channels) for name in ("mean", "std"))
        return replace(given, train_labels=self.train_labels, test_labels=self.test_labels)

    def _array_set(self) -> ArraySet:
        self.normalise = self.normalise or "none"
        if self.normalise not in NORMALISE:
            got = shortened(self.normalise)
            raise UserError(f"data: normalise: got {got}, expected one of {', '.join(NORMALISE)}")
        if not isinstance(self.test, (tuple, list)) or len(self.test) not in (1, 2, 3):
            raise UserError(
                f"data: test: got {shortened(type(self.test))}, expected (inputs, targets) or with the owners"
            )
        inputs, tests = alike(inputs_of(self.inputs, "data: inputs"), inputs_of(self.test[0], "data: test inputs"))
        targets, test_targets = self._targets(inputs, tests)
        task = self.task or ("next-token" if self.targets is None else task_of(targets))
        if self.normalise != "none" and not has_floats(inputs):
            if task == "next-token" or is_image(inputs):
                raise UserError("data: normalise has no effect on tokens and images: leave it out")
            inputs, tests = as_floats(inputs), as_floats(tests)
        image = is_image(inputs) and is_image(tests) if self.image is None else self.image
        if image:
            inputs, tests = (self._images(part) for part in (inputs, tests))
        owners = names_of(self.test[2], "data: owners of the test rows") if len(self.test) == 3 else None
        names = [str(name) for name in self.class_names or ()]
        return ArraySet(inputs, targets, tests, test_targets, None, owners, names, task, image=image)

    def _targets(self, inputs: Inputs, tests: Inputs) -> list[np.ndarray]:
        """Those of the training and of the test rows; of tokens, the next ones."""
        assert self.test is not None
        given = [self.targets, self.test[1] if len(self.test) > 1 else None]
        if (given[0] is None) != (given[1] is None):
            raise UserError("data: got targets of training or test rows alone, expected both, or none for tokens")
        if given[0] is not None:
            return [
                native(rows_of(part, f"data: {what}"))
                for what, part in zip(("targets", "test targets"), given, strict=True)
            ]
        if self.task not in (None, "", "next-token"):
            raise UserError(f"data: got no targets for the task {self.task}, expected targets=")
        both = [next_tokens(part) for part in (inputs, tests)]
        if isinstance(inputs, Ragged):
            width = max(part.shape[1] for part in both)
            both = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1) for part in both]
        return both

    def _images(self, part: Inputs) -> np.ndarray:
        if not isinstance(part, np.ndarray) or part.dtype != np.uint8 or part.ndim not in (3, 4):
            raise UserError("data: inputs are no images, expected uint8 [n, rows, columns, channels], or image=False")
        return channels_last(part)

    def _divided(self, rows: int) -> list[np.ndarray]:
        """The rows of each client."""
        if isinstance(self.clients, (str, bytes, Mapping)) or not hasattr(self.clients, "__len__"):
            raise UserError(
                f"data: got clients {shortened(self.clients)}, expected the owner of each row, or a list of index "
                "arrays, one per client"
            )
        if not len(self.clients):
            raise UserError("data: got no clients, expected at least one array of indices")
        if tuple(getattr(self.clients, "shape", ())) == (rows, 1):
            raise UserError(
                f"data: clients: got shape [{rows}, 1], expected the owner of each row, [{rows}] as by clients[:, 0], "
                "or a list of index arrays"
            )
        if isinstance(first := next(iter(self.clients)), (list, tuple)) or np.ndim(first):
            return [self._indices(client, indices, rows) for client, indices in enumerate(self.clients)]
        owners = names_of(self.clients, "data: clients")
        if owners.ndim != 1 or owners.dtype.kind not in "iuUSb":
            got = f"{owners.dtype} of shape {list(owners.shape)}"
            raise UserError(f"data: clients: got {got}, expected a name or a number for each row, or index arrays")
        if len(owners) != rows:
            raise UserError(f"data: clients: got {len(owners)} owners for {rows} rows, expected one for each")
        self.client_names = [str(name) for name in np.unique(owners).tolist()]
        return natural(owners)

    def _tests(self, owners: np.ndarray) -> list[np.ndarray]:
        """The test rows of each client."""
        rows = len(self.examples.test_targets)
        if owners.shape != (rows,):
            got = list(owners.shape)
            raise UserError(f"data: owners of the test rows: got shape {got}, expected one for each of {rows} rows")
        names = self.client_names or [str(client) for client in range(len(self.clients))]
        if unknown := {str(owner) for owner in owners.tolist()} - {*names}:
            known = ", ".join(names[:10])
            raise UserError(f"data: test rows of {min(unknown)!r}, who has no training rows, expected of {known}")
        return tests_of(names, owners)

    def _indices(self, client: int, given: object, count: int) -> np.ndarray:
        what = f"data: client {client}"
        indices = array(given, what)
        if indices.size == 0:
            raise UserError(f"{what} has no rows, expected at least one index: leave the client out")
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            shape = list(indices.shape)
            raise UserError(f"{what}: got {indices.dtype} of shape {shape}, expected a list of integer indices")
        if indices.min() < 0 or indices.max() >= count:
            odd = indices.min() if indices.min() < 0 else indices.max()
            raise UserError(f"{what}: got index {odd}, expected 0 to {count - 1}, for {count} training rows")
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
        examples = self.examples
        about: tuple[Any, ...] = (self.mean, self.std, examples.class_names)
        if isinstance(examples, ArraySet):
            about += (examples.task, self.normalise, examples.image, [*named(examples.inputs)])
        if self.client_names:
            about += (self.client_names,)
        if self.tested is not None:
            about += (len(self.tested),)  # which follow the clients' rows below
        value = hashlib.sha256(repr(about).encode())
        for part in (*_parts(examples), *self.clients, *(self.tested or ())):
            value.update(repr((part.dtype.str, part.shape)).encode())
            value.update(np.ascontiguousarray(part).data)
        return value.hexdigest()


_IMAGES = ("train_images", "train_labels", "test_images", "test_labels", "mean", "std")
_ARRAYS = ("inputs", "targets", "test", "task", "normalise", "image")
_REQUIRED = ("inputs", "test")


def _parts(examples: Examples) -> list[np.ndarray]:
    """All arrays of a data set."""
    parts: list[np.ndarray] = []
    for inputs, targets in ((examples.inputs, examples.targets), (examples.test_inputs, examples.test_targets)):
        for rows in named(inputs).values():
            parts += [rows.values, rows.starts] if isinstance(rows, Ragged) else [rows]
        parts.append(targets)
    return parts


def shards(data: Data, settings: Mapping[str, Any]) -> str:
    """The directory of the data's shards, for the setting ``dataset``; the same arrays always have the same one.

    Where the settings ask for a validation set, it is drawn from the clients' images.
    """
    if not isinstance(data, Data):
        raise UserError(f"data: got {shortened(data)}, expected fedlada_mpi.Data(inputs=, targets=, ...)")
    if "dataset" in settings:
        raise UserError(f"data and dataset contradict each other: got dataset {shortened(settings['dataset'])}, too")
    asked = {name: coerce(SETTINGS[name], settings.get(name, SETTINGS[name].default)) for name in _READ}
    for name, value in asked.items():
        check_value(SETTINGS[name], value, name)
    share, seed = asked["validation"], asked["partition_seed"] if asked["validation"] else PrepareSettings.seed
    if data.no_classes is not None and settings.get("task") in (None, "", "classification"):
        raise data.no_classes
    root, digest = data_root(asked["data_dir"]), data.digest
    held_out = f"-validation{share!r}-seed{seed}" if share else ""
    out = root / f"{ARRAYS}-{digest[:12]}{held_out}"
    with PREPARING:
        if not (out / MANIFEST).is_file() or not complete(read_manifest(out)):
            _write(data, digest, out, share, seed)
    return str(out)


def _write(data: Data, digest: str, out: Path, validation: float, seed: int) -> None:
    examples, trained_on = data.examples, np.unique(np.concatenate(data.clients))
    labels = strata_of(examples, STRATA)
    labels = np.zeros(len(examples.targets), int) if labels is None else labels
    held = trained_on[hold_out(validation, labels[trained_on], seed)[1]]
    owned = [indices[~np.isin(indices, held)] for indices in data.clients]
    if empty := [client for client, indices in enumerate(owned) if not len(indices)]:
        raise UserError(f"--validation: got {validation:g}, which leaves client {empty[0]} no row: give less")
    kept = np.setdiff1d(np.arange(len(examples.targets)), held)
    settings = PrepareSettings(
        ARRAYS,
        out,
        clients=len(owned),
        silos=min(SILOS, len(owned)),
        partition="natural",
        seed=seed,
        validation=validation,
        normalise=data.normalise or "",
    )
    division = Division(owned, kept, held, data.tested, data.client_names)
    if settings.normalised == "client" and isinstance(examples, ArraySet):
        examples, division = by_client(examples, division)
    manifest = describe(settings, digest, examples, division)
    manifest |= {name: list(given) for name in ("mean", "std") if (given := getattr(data, name)) is not None}
    write_shards(out, manifest, examples, division)
