"""What a data set must provide, and the checks that each one must pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ...support.errors import UserError


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

    @property
    def classes(self) -> int:
        return len(self.class_names)


@dataclass
class Ragged:
    """Rows of any length, one after another: row i is ``values[starts[i]:starts[i + 1]]``."""

    values: np.ndarray
    starts: np.ndarray  # int64 [n + 1], from 0, not descending


Inputs: TypeAlias = "np.ndarray | Ragged | dict[str, np.ndarray | Ragged]"


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
        raise UserError(f"{where}: got {len(images)} images and {len(labels)} labels, expected one label per image")
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
