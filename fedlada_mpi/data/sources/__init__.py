"""Raw data sets as arrays. A new data set is a function ``(raw, workers) -> ImageSet | ArraySet`` in ``LOADERS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...settings import SHIPPED
from ...support.errors import UserError
from ..checksums import sha256
from . import imagefolder, text
from .base import KNOWN, ArraySet, ImageSet, check, check_arrays, listed, statistics
from .cifar import CIFAR10, CIFAR100, load_cifar10, load_cifar100
from .embedded import EMBEDDED
from .imagefolder import load_imagefolder
from .npz import load_digits, load_npz
from .raw import find_raw, raw_available
from .table import load_csv
from .text import load_text
from .tinyimagenet import load_tinyimagenet


def load_embedded(name: str, raw: Path, workers: int = 1) -> ArraySet:
    """A data set that ships with the package."""
    return EMBEDDED[name]()


LOADERS: dict[str, Callable[..., ImageSet | ArraySet]] = {
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "tinyimagenet": load_tinyimagenet,
    "digits": load_digits,
    "imagefolder": load_imagefolder,
    "npz": load_npz,
    "csv": load_csv,
    "text": load_text,
    **{name: partial(load_embedded, name) for name in EMBEDDED},
}
CLASS_NAMES = {"cifar10": CIFAR10.names, "cifar100": CIFAR100.names}


def load(dataset: str, raw: Path, workers: int, **options: Any) -> ImageSet | ArraySet:
    """Read and check a data set; any of them may come as an .npz. ``options`` are those of its loader."""
    try:
        if raw.suffix == ".npz":
            if given := [name for name, value in options.items() if value and name != "task"]:
                raise UserError(f"--{given[0].replace('_', '-')} has no effect on {raw}: leave it out")
            images = load_npz(raw, class_names=CLASS_NAMES.get(dataset, ()), task=options.get("task", ""))
        elif dataset == "npz":
            raise UserError(f"--raw: got {raw}, expected a .npz file for --dataset npz")
        else:
            images = LOADERS[dataset](raw, workers, **options)
    except OSError as error:
        raise UserError(f"{error.filename or raw}: cannot be read ({error.strerror or error})") from None
    except MemoryError:
        raise UserError(f"{raw}: does not fit into memory: use a part of it, or a larger machine") from None
    if isinstance(images, ArraySet):
        if dataset in KNOWN:
            raise UserError(f"{raw}: got train_inputs, expected train_images for {dataset}")
        check_arrays(images, raw)
    else:
        check(images, dataset, raw)
    return images


def load_listed(dataset: str, raw: Path, workers: int, classes: Sequence[str], **options: Any) -> ArraySet:
    """As ``load``, with the classes of a list, of which there may be rows of some only."""
    loader = LOADERS[dataset]
    if dataset == "imagefolder":
        loader = partial(load_imagefolder, classes=classes)
    try:
        if dataset == "npz" and raw.suffix != ".npz":
            raise UserError(f"--raw: got {raw}, expected a .npz file for --dataset npz")
        examples = loader(raw, workers, **options)
    except OSError as error:
        raise UserError(f"{error.filename or raw}: cannot be read ({error.strerror or error})") from None
    except MemoryError:
        raise UserError(f"{raw}: does not fit into memory: use a part of it, or a larger machine") from None
    arrays = listed(examples, classes, raw)
    check_arrays(arrays, raw)
    return arrays


def fingerprint(dataset: str, raw: Path, like: str = "") -> str:
    """Distinguishes this raw data from other data of the same name; official data is always the same.

    ``like``: one of any version, to compare with.
    """
    if dataset == "imagefolder" and raw.is_dir():
        return imagefolder.fingerprint(raw, like)
    if dataset == "text" and raw.is_dir():
        return text.fingerprint(raw)
    if dataset in SHIPPED or (raw.suffix != ".npz" and dataset != "csv") or not raw.is_file():
        return "official"
    return sha256(raw)


__all__ = [
    "KNOWN",
    "LOADERS",
    "ArraySet",
    "ImageSet",
    "fingerprint",
    "find_raw",
    "load",
    "load_listed",
    "raw_available",
    "statistics",
]
