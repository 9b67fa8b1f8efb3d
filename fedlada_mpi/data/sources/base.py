"""What a data set must provide, and the checks that each one must pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ...settings import TASKS
from ...support.errors import UserError, shortened
from ...support.suggestions import did_you_mean
from ..json_checks import LARGEST
from ..manifest import DTYPES, IGNORED, MOST_DIMENSIONS, MOST_VALUES, is_name
from ..rows import Inputs, Ragged, Rows, is_finite, length, named, unnamed, values_of, with_values

__all__ = ["ArraySet", "ImageSet", "Inputs", "Ragged"]

REGRESSION, OTHER_TASKS = "task regression", "give the task"


@dataclass
class ImageSet:
    """A labelled data set in memory: uint8 [n, H, W, C] images and int64 labels of two splits."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: list[str] = field(default_factory=list)
    owners: np.ndarray | None = None
    test_share: float = 0.0  # of the images, where they came without a test set

    test_owners: None = None  # of the test images; those of an ``ArraySet`` may have some

    @property
    def classes(self) -> int:
        return len(self.class_names)

    # By the names that an ArraySet has.
    @property
    def inputs(self) -> np.ndarray:
        return self.train_images

    @property
    def targets(self) -> np.ndarray:
        return self.train_labels

    @property
    def test_inputs(self) -> np.ndarray:
        return self.test_images

    @property
    def test_targets(self) -> np.ndarray:
        return self.test_labels


@dataclass
class ArraySet:
    """A data set of any arrays in memory: inputs and targets of two splits, one row per example."""

    inputs: Inputs
    targets: np.ndarray
    test_inputs: Inputs
    test_targets: np.ndarray
    owners: np.ndarray | None = None  # of the training rows
    test_owners: np.ndarray | None = None  # of the test rows; None: nobody's
    class_names: list[str] = field(default_factory=list)  # where targets are the numbers of classes
    task: str = "classification"  # what a run learns unless it is told otherwise
    loss: str = ""
    feature_names: list[str] = field(default_factory=list)  # of the columns of two-dimensional inputs
    image: bool = False  # uint8 [n, rows, columns, channels], normalised per channel
    test_share: float = 0.0  # of the rows, where they came without test rows
    tokens: int = 0  # of the vocabulary; 0: up to the largest that there is

    @cached_property
    def classes(self) -> int:
        """The classes, tokens or labels that targets number; 0 where they number nothing."""
        if self.class_names:
            return len(self.class_names)
        if self.task == "next-token":
            return self.tokens or 1 + max(
                _largest(part) for part in (self.inputs, self.test_inputs, self.targets, self.test_targets)
            )
        if self.task == "segmentation":
            known = [part[part != IGNORED] for part in (self.targets, self.test_targets)]
            return 1 + max(_largest(part) for part in known)
        return 0

    @property
    def labelled(self) -> bool:
        """Whether the target of a row is the number of its class."""
        return self.task == "classification" and self.targets.ndim == 1


def _largest(inputs: Inputs) -> int:
    values = map(values_of, named(inputs).values())
    return max((int(part.max()) for part in values if part.size and part.dtype.kind in "iu"), default=0)


@dataclass(frozen=True)
class Known:
    """What is fixed about a public data set; mean and std are ours, as the paper only says "common normalization"."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


KNOWN = {
    "cifar10": Known((32, 32, 3), 10, (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "cifar100": Known((32, 32, 3), 100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "tinyimagenet": Known((64, 64, 3), 200, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


def check(images: ImageSet, dataset: str, raw: Path | str) -> None:
    """Refuse what later stages could not train on, naming the file it came from."""
    for split in ("train", "test"):
        labels = getattr(images, f"{split}_labels")
        check_shapes(getattr(images, f"{split}_images"), labels, f"{raw}: {split}")
        if labels.min() < 0:
            raise UserError(f"{raw}: {split} label {labels.min()} is negative, expected 0 to K-1")
    train, test = images.train_images.shape[1:], images.test_images.shape[1:]
    if train != test:
        raise UserError(
            f"{raw}: got training images of {shape_text(train)} and test images of {shape_text(test)}, "
            "expected one size"
        )
    if dataset in KNOWN and train != KNOWN[dataset].shape:
        raise UserError(
            f"{raw}: got images of {shape_text(train)}, expected {shape_text(KNOWN[dataset].shape)} for {dataset}"
        )
    # Before they are counted, which takes memory for every class up to the largest label.
    if (largest := images.train_labels.max()) >= len(images.train_labels):
        raise UserError(
            f"{raw}: got label {largest} among {len(images.train_labels)} training images, "
            "expected labels 0 to K-1 with images of each"
        )
    per_class = np.bincount(images.train_labels, minlength=images.classes)
    if dataset in KNOWN and len(per_class) != KNOWN[dataset].classes:
        raise UserError(f"{raw}: got {len(per_class)} classes, expected {KNOWN[dataset].classes} for {dataset}")
    if len(per_class) < 2:
        raise UserError(f"{raw}: got {len(per_class)} class, expected at least 2")
    if len(per_class) > images.classes:
        raise UserError(
            f"{raw}: got labels up to {len(per_class) - 1} but {images.classes} class names, expected a name for each"
        )
    if not per_class.all():
        raise UserError(
            f"{raw}: class {per_class.argmin()} has no training images, expected labels 0 to K-1 with images of each"
        )
    if images.test_labels.max() >= images.classes:
        raise UserError(
            f"{raw}: test label {images.test_labels.max()} is not among the training labels 0 to {images.classes - 1}"
        )


def check_arrays(examples: ArraySet, where: Path | str) -> None:
    """Refuse what later stages could not train on, naming where it came from; types become those of the shards."""
    _widen(examples)
    for split in ("", "test_"):
        what = f"{where}: {'test' if split else 'training'}"
        inputs, targets = getattr(examples, f"{split}inputs"), getattr(examples, f"{split}targets")
        rows = {_label(name): array for name, array in named(inputs).items()}
        if odd := next((name for name in named(inputs) if name and not is_name(name)), None):
            raise UserError(f"{where}: inputs called {odd!r}, expected names of keywords, such as age")
        for name, array in {**rows, "targets": targets}.items():
            _check_array(values_of(array), f"{what} {name}")
            if length(array) != len(targets):
                raise UserError(
                    f"{what}: got {length(array)} rows of {name} and {len(targets)} targets, expected as many of each"
                )
        if isinstance(targets, Ragged) or not len(targets):
            raise UserError(f"{what} rows: got none, expected at least one")
        owners = getattr(examples, f"{split}owners")
        if owners is not None and (np.ndim(owners) != 1 or len(owners) != len(targets)):
            shape = list(np.shape(owners))
            raise UserError(f"{what} owners: got shape {shape}, expected one owner for each of {len(targets)} rows")
    _check_alike(examples, where)
    _check_owners(examples, where)
    _check_task(examples, where)


def listed(examples: ImageSet | ArraySet, classes: Sequence[str], where: Path | str) -> ArraySet:
    """With the classes of a list; those of the examples are found in it by their names, if they have any."""
    if isinstance(examples, ImageSet):
        images = (examples.inputs, examples.targets, examples.test_inputs, examples.test_targets)
        names, share = examples.class_names, examples.test_share
        examples = ArraySet(*images, examples.owners, None, names, image=True, test_share=share)
    if examples.task not in ("classification", "segmentation"):
        if classes:
            raise UserError(f"--classes has no effect on the task {examples.task or 'of this data'}: leave it out")
        return examples
    if not classes:
        raise UserError(
            f"{where}: got no --classes, expected FILE with the name of a class on each line, for all silos"
        )
    targets, tests = examples.targets, examples.test_targets
    number, named_classes = {name: label for label, name in enumerate(classes)}, [*examples.class_names]
    if named_classes == [str(label) for label in range(len(named_classes))] and not {*named_classes} <= {*number}:
        named_classes = []  # numbers of the list
    if named_classes:
        if unknown := [name for name in named_classes if name not in number]:
            known = ", ".join(classes[:10])
            raise UserError(f"{where}: got class {shortened(unknown[0])}, expected one of --classes: {known}")
        # Labels without a name are refused with those that are too large.
        numbers = np.array([number[name] for name in named_classes], np.int64)
        if all(part.ndim == 1 and part.dtype.kind in "iub" for part in (targets, tests)):
            most = max(int(part.max(initial=0)) for part in (targets, tests))
            if most >= len(numbers):
                raise UserError(f"{where}: got class {most} of {len(numbers)} class names, expected a name for each")
            targets, tests = (numbers[part] if part.min(initial=0) >= 0 else part for part in (targets, tests))
    return replace(examples, targets=targets, test_targets=tests, class_names=[*classes])


def _widen(examples: ArraySet) -> None:
    """Training and test values of one kind, such as float32 and float64, get the wider type, in this byte order."""
    train, test = named(examples.inputs), named(examples.test_inputs)
    pairs = {name: _widened(train[name], test[name]) for name in train if name in test}
    if [*train] == [*test]:
        examples.inputs = unnamed({name: pair[0] for name, pair in pairs.items()})
        examples.test_inputs = unnamed({name: pair[1] for name, pair in pairs.items()})
    both = _widened(examples.targets, examples.test_targets)
    examples.targets, examples.test_targets = values_of(both[0]), values_of(both[1])


def _widened(one: Rows, other: Rows) -> tuple[Rows, Rows]:
    kinds = [values_of(array).dtype for array in (one, other)]
    if kinds[0].kind != kinds[1].kind or kinds[0].kind not in "iuf":
        return one, other
    wide = np.promote_types(*kinds).newbyteorder("=")
    parts = [with_values(array, values_of(array).astype(wide, copy=False)) for array in (one, other)]
    return parts[0], parts[1]


def _label(name: str) -> str:
    return f"inputs {name!r}" if name else "inputs"


def _check_array(values: np.ndarray, what: str) -> None:
    if values.dtype.name not in DTYPES:
        raise UserError(f"{what} are {values.dtype}, expected bool, integers or floats of up to 64 bits")
    if not values.ndim:
        raise UserError(f"{what}: got a single value, expected an array with one row per example")
    if 0 in values.shape[1:] or values.ndim > MOST_DIMENSIONS:
        raise UserError(f"{what} have shape {list(values.shape)}, expected up to {MOST_DIMENSIONS} dimensions above 0")
    if not is_finite(values):
        place = np.argwhere(~np.isfinite(values))[0]
        value, row = values[tuple(place)], int(place[0])
        raise UserError(f"{what}: got {value} in row {row}, expected finite numbers: leave the row out, or fill it in")
    if values.dtype.itemsize > 2 and values.dtype.kind in "fu" and values.size:
        most, text = (LARGEST, f"{LARGEST:g}") if values.dtype.kind == "f" else (np.iinfo(np.int64).max, "2^63 - 1")
        if values.max() > most or (values.dtype.kind == "f" and -values.min() > most):
            place = np.argwhere(np.abs(values) > most)[0]
            raise UserError(f"{what}: got {values[tuple(place)]} in row {place[0]}, expected numbers up to {text}")


def _check_alike(examples: ArraySet, where: Path | str) -> None:
    """Training and test rows have the same arrays."""
    train, test = (
        {_label(name): array for name, array in named(inputs).items()}
        for inputs in (examples.inputs, examples.test_inputs)
    )
    if [*train] != [*test] or isinstance(examples.inputs, dict) != isinstance(examples.test_inputs, dict):
        raise UserError(f"{where}: got training {', '.join(train)} and test {', '.join(test)}, expected the same")
    pairs = {name: (train[name], test[name]) for name in train}
    for name, (one, other) in {**pairs, "targets": (examples.targets, examples.test_targets)}.items():
        kinds = [
            (values_of(array).dtype, values_of(array).shape[1:], isinstance(array, Ragged)) for array in (one, other)
        ]
        if kinds[0] != kinds[1]:
            texts = [f"{dtype} {'ragged ' * ragged}{list(shape)}" for dtype, shape, ragged in kinds]
            raise UserError(
                f"{where}: got training {name} of {texts[0]} and test {name} of {texts[1]}, expected the same"
            )


def _check_owners(examples: ArraySet, where: Path | str) -> None:
    if examples.test_owners is None:
        return
    if examples.owners is None:
        raise UserError(f"{where}: got owners of the test rows alone, expected those of the training rows, too")
    known = {str(owner) for owner in np.unique(examples.owners).tolist()}
    if unknown := [name for name in map(str, np.unique(examples.test_owners).tolist()) if name not in known]:
        names = ", ".join(sorted(known)[:10])
        raise UserError(f"{where}: test rows of {unknown[0]!r}, who has no training rows, expected one of {names}")


def _check_task(examples: ArraySet, where: Path | str) -> None:
    task = examples.task
    if task not in ("", *TASKS):
        raise UserError(f"{where}: task {task!r}, expected one of {', '.join(TASKS)}{did_you_mean(task, TASKS)}")
    if task == "classification":
        _check_classes(examples, where)
    elif task == "survival":
        for part in (examples.targets, examples.test_targets):
            if part.shape[1:] != (2,) or part.dtype.kind not in "biuf":
                got = f"{part.dtype} of shape {list(part.shape)}"
                raise UserError(f"{where}: survival targets are {got}, expected numbers [n, 2]: event and time")
            if not np.isin(part[:, 0], (0, 1)).all() or part[:, 1].min() < 0:
                raise UserError(f"{where}: survival targets: expected events of 0 or 1, and times of at least 0")
        if examples.targets.dtype.kind != "f":
            examples.targets, examples.test_targets = (
                part.astype(np.float64) for part in (examples.targets, examples.test_targets)
            )
    elif task == "next-token":
        for array in named(examples.inputs).values():
            if values_of(array).dtype.kind not in "iu" or values_of(array).min(initial=0) < 0:
                raise UserError(f"{where}: inputs are {values_of(array).dtype}, expected tokens: integers from 0")
        if examples.classes > MOST_VALUES:
            raise UserError(f"{where}: got token {examples.classes - 1}, expected up to {MOST_VALUES - 1}")
        if examples.targets.dtype.kind in "iu" and examples.targets.max() < 0:
            raise UserError(f"{where}: all targets are -1, which is none, expected rows of at least 2 tokens")
    elif task == "segmentation":
        _check_masks(examples, where)


def _check_masks(examples: ArraySet, where: Path | str) -> None:
    """Masks are bytes; truth values and other integers become them where they fit."""
    masks = examples.targets, examples.test_targets
    for part in masks:
        small = part.dtype.kind in "biu" and part.min() >= 0 and part.max() <= IGNORED
        if not small:
            got = f"{part.min()} to {part.max()}" if part.dtype.kind in "iu" else str(part.dtype)
            raise UserError(f"{where}: masks are {got}, expected the class of each pixel, 0 to 254, {IGNORED} for none")
    if (masks[0] == IGNORED).all():
        raise UserError(f"{where}: all pixels of the masks are {IGNORED}, which is none, expected some with a class")
    if masks[0].dtype.kind in "bi":
        examples.targets, examples.test_targets = (part.astype(np.uint8) for part in masks)


def _check_classes(examples: ArraySet, where: Path | str) -> None:
    """Classes are numbers from 0, as many as there are names."""
    for name, part in (("targets", examples.targets), ("test targets", examples.test_targets)):
        if part.ndim != 1 or part.dtype.kind not in "iub":
            got = f"{part.dtype} of shape {list(part.shape)}"
            raise UserError(f"{where}: {name} are {got}, expected the class of each row; other tasks: {OTHER_TASKS}")
        if part.min() < 0:
            raise UserError(f"{where}: got class {part.min()} in {name}, expected 0 to K-1; numbers: {REGRESSION}")
    largest, rows = int(examples.targets.max()), len(examples.targets)
    if not examples.class_names:
        # No more classes than rows, as each should have some.
        if largest >= max(2, rows):
            raise UserError(f"{where}: got class {largest} among {rows} rows, expected 0 to K-1; numbers: {REGRESSION}")
        examples.class_names = [str(label) for label in range(max(2, largest + 1))]
    if len(examples.class_names) < 2:
        raise UserError(
            f"{where}: all rows are of class {shortened(examples.class_names[0])}, expected at least 2 classes"
        )
    for part in (examples.targets, examples.test_targets):
        if part.max() >= len(examples.class_names):
            names = len(examples.class_names)
            raise UserError(f"{where}: got class {part.max()} of {names} classes, expected 0 to {names - 1}")
    examples.targets, examples.test_targets = (p.astype(np.int64) for p in (examples.targets, examples.test_targets))


def check_shapes(images: np.ndarray, labels: np.ndarray, where: str) -> None:
    """Refuse a split by the types and shapes of its arrays."""
    if images.dtype != np.uint8:
        raise UserError(f"{where} images are {images.dtype}, expected uint8 with values 0 to 255")
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        raise UserError(
            f"{where} images have shape {list(images.shape)}, expected [n, height, width, 1 or 3] (channels last)"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(
            f"{where} labels are {labels.dtype} of shape {list(labels.shape)}, expected one integer per image"
        )
    if len(images) != len(labels):
        raise UserError(f"{where} got {len(images)} images and {len(labels)} labels, expected one label per image")
    if len(images) == 0 or 0 in images.shape:
        raise UserError(f"{where} images have shape {list(images.shape)}, expected at least one image")


def statistics(
    dataset: str, images: np.ndarray, chosen: np.ndarray | None = None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels scaled to 0..1; of all images, or of the ``chosen``."""
    if dataset in KNOWN:
        return KNOWN[dataset].mean, KNOWN[dataset].std
    chosen = np.arange(len(images)) if chosen is None else chosen
    channels = images.shape[3]
    pixels = len(chosen) * images[0].size // channels
    # A histogram keeps the sums exact, so that the results are the same on every machine.
    levels = np.arange(256)
    mean, std = [], []
    for channel in range(channels):
        counts = np.zeros(256, dtype=np.int64)
        for block in _blocks(images, chosen):
            counts += np.bincount(block[..., channel].ravel(), minlength=256)
        total, squares = int(counts @ levels), int(counts @ levels**2)
        mean.append(total / pixels / 255)
        std.append(math.sqrt(squares * pixels - total * total) / pixels / 255)
    # A constant channel has no deviation to divide by.
    return tuple(mean), tuple(value or 1.0 for value in std)


def _blocks(images: np.ndarray, chosen: np.ndarray, count: int = 4096) -> Iterator[np.ndarray]:
    return (images[chosen[start : start + count]] for start in range(0, len(chosen), count))


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
