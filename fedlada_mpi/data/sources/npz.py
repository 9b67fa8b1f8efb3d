"""Any data set in one .npz file, and the handwritten digits that ship with this package.

Arrays: ``train_images``, ``train_labels``, ``test_images``, ``test_labels``; optionally
``train_clients`` (the owner of each training image) and ``class_names``.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from ...support.errors import UserError
from .base import ImageSet, check_shapes
from .bounds import ZIP_ERRORS, check_memory

# Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning
# Repository, doi:10.24432/C50P49, CC BY 4.0; docs/data.md describes how this file was made.
DIGITS = Path(__file__).with_name("digits.npz")

REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")
OPTIONAL = ("train_clients", "class_names")


def load_npz(raw: Path, workers: int = 1, class_names: tuple[str, ...] = ()) -> ImageSet:
    try:
        with zipfile.ZipFile(raw) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if missing := [name for name in REQUIRED if name not in members]:
                raise UserError(f"{raw}: got arrays {', '.join(members) or 'none'}, expected also {', '.join(missing)}")
            used = {name: members[name] for name in (*REQUIRED, *OPTIONAL) if name in members}
            _check_headers({name: _header(archive, info) for name, info in used.items()}, raw)
            arrays = {name: _array(archive, info) for name, info in used.items()}
    except ZIP_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{raw}: not a complete .npz of plain arrays ({reason}): copy it or save it again") from None
    train_labels, test_labels = (arrays[name].astype(np.int64) for name in ("train_labels", "test_labels"))
    names = [str(name) for name in arrays["class_names"]] if "class_names" in arrays else list(class_names)
    if not names:
        # No more classes than images, whatever the labels are: each must have some.
        names = [str(label) for label in range(min(int(train_labels.max()) + 1, len(train_labels)))]
    return ImageSet(
        channels_last(arrays["train_images"]),
        train_labels,
        channels_last(arrays["test_images"]),
        test_labels,
        names,
        arrays.get("train_clients"),
    )


def load_digits(raw: Path = DIGITS, workers: int = 1) -> ImageSet:
    return load_npz(raw)


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """An array of the shape and type that a member declares, without memory for its elements."""
    with archive.open(info) as stream:
        version = npy.read_magic(stream)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"{info.filename} is of format {version}")
        shape, _, dtype = read(stream)
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or min(shape, default=0) < 0 or stream.tell() + size != info.file_size:
            raise ValueError(f"{info.filename} has {info.file_size} bytes for {dtype} of shape {list(shape)}")
    return np.broadcast_to(np.zeros((), dtype), shape)


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as stream:
        return npy.read_array(stream, allow_pickle=False)


def _check_headers(headers: dict[str, np.ndarray], raw: Path) -> None:
    """Everything that can be refused before memory is taken."""
    for split in ("train", "test"):
        images, labels = headers[f"{split}_images"], headers[f"{split}_labels"]
        check_shapes(channels_last(images), labels, f"{raw}: {split}")
    owners, labels = headers.get("train_clients"), headers["train_labels"]
    if owners is not None and owners.shape != labels.shape:
        raise UserError(f"{raw}: train_clients has shape {list(owners.shape)}, expected one owner per training image")
    if (names := headers.get("class_names")) is not None and names.ndim != 1:
        raise UserError(f"{raw}: class_names has shape {list(names.shape)}, expected a list")
    check_memory(sum(array.nbytes for array in headers.values()), raw)


def channels_last(images: np.ndarray) -> np.ndarray:
    return images[..., np.newaxis] if images.ndim == 3 else images
