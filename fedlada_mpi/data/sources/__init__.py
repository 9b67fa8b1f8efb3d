"""Raw data sets as arrays. A new data set is one function ``(raw, workers) -> ImageSet`` in ``LOADERS``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...support.errors import UserError
from ..checksums import sha256
from . import imagefolder
from .base import KNOWN, ImageSet, check, statistics
from .cifar import CIFAR10, CIFAR100, load_cifar10, load_cifar100
from .imagefolder import load_imagefolder
from .npz import load_digits, load_npz
from .raw import find_raw, raw_available
from .tinyimagenet import load_tinyimagenet

LOADERS: dict[str, Callable[..., ImageSet]] = {
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "tinyimagenet": load_tinyimagenet,
    "digits": load_digits,
    "imagefolder": load_imagefolder,
    "npz": load_npz,
}
CLASS_NAMES = {"cifar10": CIFAR10.names, "cifar100": CIFAR100.names}


def load(dataset: str, raw: Path, workers: int, **options: Any) -> ImageSet:
    """Read and check a data set; any of them may come as an .npz. ``options`` are those of its loader."""
    try:
        if raw.suffix == ".npz":
            if given := [name for name, value in options.items() if value]:
                raise UserError(f"--{given[0].replace('_', '-')} has no effect on {raw}: leave it out")
            images = load_npz(raw, class_names=CLASS_NAMES.get(dataset, ()))
        elif dataset == "npz":
            raise UserError(f"--raw: got {raw}, expected a .npz file for --dataset npz")
        else:
            images = LOADERS[dataset](raw, workers, **options)
    except OSError as error:
        raise UserError(f"{error.filename or raw}: cannot be read ({error.strerror or error})") from None
    except MemoryError:
        raise UserError(f"{raw}: does not fit into memory: use a part of it, or a larger machine") from None
    check(images, dataset, raw)
    return images


def fingerprint(dataset: str, raw: Path) -> str:
    """Distinguishes this raw data from other data of the same name; official data is always the same."""
    if dataset == "imagefolder" and raw.is_dir():
        return imagefolder.fingerprint(raw)
    if raw.suffix != ".npz" or dataset == "digits":
        return "official"
    return sha256(raw)


__all__ = ["KNOWN", "LOADERS", "ImageSet", "fingerprint", "find_raw", "load", "raw_available", "statistics"]
