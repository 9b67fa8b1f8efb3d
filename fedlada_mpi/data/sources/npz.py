"""Any data set in one .npz file, and the handwritten digits that ship with this package.

Arrays: ``train_images``, ``train_labels``, ``test_images``, ``test_labels``; optionally
``train_clients`` (the owner of each training image) and ``class_names``.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from ...errors import UserError
from .base import ImageSet

# Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning
# Repository, doi:10.24432/C50P49, CC BY 4.0; docs/data.md describes how this file was made.
DIGITS = Path(__file__).with_name("digits.npz")

REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")


def load_npz(raw: Path, workers: int = 1, class_names: tuple[str, ...] = ()) -> ImageSet:
    try:
        with np.load(raw, allow_pickle=False) as file:
            missing = [name for name in REQUIRED if name not in file.files]
            if missing:
                raise UserError(
                    f"{raw}: got arrays {', '.join(file.files) or 'none'}, expected also {', '.join(missing)}"
                )
            train_images, test_images = (_channels_last(file[name]) for name in ("train_images", "test_images"))
            train_labels, test_labels = (_integers(file[name]) for name in ("train_labels", "test_labels"))
            owners = file["train_clients"] if "train_clients" in file.files else None
            names = [str(name) for name in file["class_names"]] if "class_names" in file.files else list(class_names)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{raw}: not a complete .npz of plain arrays ({reason}): copy it or save it again") from None
    if owners is not None and owners.shape != train_labels.shape:
        raise UserError(f"{raw}: train_clients has shape {list(owners.shape)}, expected one owner per training image")
    if not names and train_labels.size and train_labels.dtype.kind in "iu":
        names = [str(label) for label in range(int(train_labels.max()) + 1)]
    return ImageSet(train_images, train_labels, test_images, test_labels, names, owners)


def load_digits(raw: Path = DIGITS, workers: int = 1) -> ImageSet:
    return load_npz(raw)


def _channels_last(images: np.ndarray) -> np.ndarray:
    return images[..., np.newaxis] if images.ndim == 3 else images


def _integers(labels: np.ndarray) -> np.ndarray:
    return labels.astype(np.int64) if labels.dtype.kind in "iu" else labels
