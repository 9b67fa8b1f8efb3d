"""Any data set in one .npz file, and the handwritten digits that ship with this package.

Arrays: ``train_images``, ``train_labels``, ``test_images``, ``test_labels``; optionally
``train_clients`` (the owner of each training image), ``test_clients`` and ``class_names``. Data that is no images has
``train_inputs``, ``train_targets``, ``test_inputs``, ``test_targets`` instead, and optionally ``task``; without targets
the inputs are tokens, and the next one is to be predicted.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from ...support.errors import UserError
from ..rows import shifted
from .base import ArraySet, ImageSet, check_shapes
from .bounds import ZIP_ERRORS, check_memory

# Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning
# Repository, doi:10.24432/C50P49, CC BY 4.0; docs/data.md describes how this file was made.
DIGITS = Path(__file__).with_name("digits.npz")

REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")
OPTIONAL = ("train_clients", "test_clients", "class_names")
ARRAYS = ("train_inputs", "test_inputs")
TARGETS = ("train_targets", "test_targets")


def load_npz(raw: Path, workers: int = 1, class_names: tuple[str, ...] = (), task: str = "") -> ImageSet | ArraySet:
    try:
        with zipfile.ZipFile(raw) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            general = any(name in members for name in (*ARRAYS, *TARGETS))
            pair = TARGETS if any(name in members for name in TARGETS) else ()
            required = (*ARRAYS, *pair) if general else REQUIRED
            if missing := [name for name in required if name not in members]:
                several = any(name.startswith("train_inputs") for name in members) and missing[0] == "train_inputs"
                advice = "; several inputs by name: from Python, fedlada_mpi.Data(inputs={...})" if several else ""
                got = ", ".join(members) or "none"
                raise UserError(f"{raw}: got arrays {got}, expected also {', '.join(missing)}{advice}")
            optional = (*OPTIONAL, "task") if general else OPTIONAL
            used = {name: members[name] for name in (*required, *optional) if name in members}
            headers = {name: _header(archive, info) for name, info in used.items()}
            (_check_arrays if general else _check_headers)(headers, raw)
            _check_owners(headers, raw, *(ARRAYS if general else REQUIRED[::2]))
            check_memory(sum(array.nbytes for array in headers.values()), raw)
            arrays = {name: _array(archive, info) for name, info in used.items()}
    except ZIP_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{raw}: not a complete .npz of plain arrays ({reason}): copy it or save it again") from None
    if general:
        return _array_set(arrays, task)
    if task not in ("", "classification"):
        raise UserError(f"--task: got {task!r} for images with labels, expected classification, or train_inputs, ...")
    train_labels, test_labels = (arrays[name].astype(np.int64) for name in ("train_labels", "test_labels"))
    names = [str(name) for name in arrays["class_names"]] if "class_names" in arrays else list(class_names)
    if not names:
        # No more classes than images, whatever the labels are: each must have some.
        names = [str(label) for label in range(min(int(train_labels.max()) + 1, len(train_labels)))]
    if "test_clients" in arrays:
        pixels, tests = (channels_last(arrays[name]) for name in ("train_images", "test_images"))
        owners = arrays.get("train_clients"), arrays["test_clients"]
        return ArraySet(pixels, train_labels, tests, test_labels, *owners, names, image=True)
    return ImageSet(
        channels_last(arrays["train_images"]),
        train_labels,
        channels_last(arrays["test_images"]),
        test_labels,
        names,
        arrays.get("train_clients"),
    )


def _array_set(arrays: dict[str, np.ndarray], task: str) -> ArraySet:
    task = task or (str(arrays["task"].reshape(-1)[0]) if "task" in arrays else "")
    inputs, tests = arrays["train_inputs"], arrays["test_inputs"]
    if "train_targets" in arrays:
        targets, test_targets = arrays["train_targets"], arrays["test_targets"]
    else:
        if task not in ("", "next-token") or inputs.ndim != 2 or tests.ndim != 2 or inputs.dtype.kind not in "iu":
            raise UserError("npz: got no train_targets, expected them, or tokens [n, length] for the task next-token")
        task = "next-token"
        targets, test_targets = shifted(inputs), shifted(tests)
        kind = np.promote_types(targets.dtype, test_targets.dtype)
        targets, test_targets = targets.astype(kind), test_targets.astype(kind)
    return ArraySet(
        inputs,
        targets,
        tests,
        test_targets,
        arrays.get("train_clients"),
        arrays.get("test_clients"),
        [str(name) for name in arrays.get("class_names", ())],
        task or task_of(targets),
        image=is_image(inputs) and is_image(tests),
    )


def task_of(targets: np.ndarray) -> str:
    """What is learnt from such targets, unless it is given; "" where they do not say it."""
    known = {(1, "b"): "classification", (1, "i"): "classification", (1, "u"): "classification"}
    known |= {(1, "f"): "regression", (2, "f"): "regression", (2, "b"): "multilabel"}
    return known.get((targets.ndim, targets.dtype.kind), "")


def is_image(inputs: object) -> bool:
    """Whether inputs are images: bytes, of one or three channels in the end."""
    if not isinstance(inputs, np.ndarray) or inputs.dtype != np.uint8:
        return False
    return inputs.ndim == 4 and inputs.shape[3] in (1, 3)


def load_digits(raw: Path = DIGITS, workers: int = 1) -> ImageSet:
    images = load_npz(raw)
    assert isinstance(images, ImageSet)
    return images


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """An array of the shape and type that a member declares, without memory for its elements."""
    with archive.open(info) as stream:
        version = npy.read_magic(stream)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"{info.filename} is of format {version}")
        shape, _, dtype = read(stream)
        if dtype.hasobject:
            raise UserError(
                f"{archive.filename}: {info.filename.removesuffix('.npy')} has Python objects, expected numbers or "
                "text: save it with .astype(float) or .astype(str)"
            )
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or stream.tell() + size != info.file_size:
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


def _check_arrays(headers: dict[str, np.ndarray], raw: Path) -> None:
    for name in (*ARRAYS, *TARGETS):
        if name in headers and not headers[name].ndim:
            raise UserError(f"{raw}: {name} is a single value, expected one row per example")
    for split in ("train", "test"):
        inputs, targets = headers[f"{split}_inputs"], headers.get(f"{split}_targets")
        if targets is not None and len(inputs) != len(targets):
            rows = f"{len(inputs)} rows of {split}_inputs and {len(targets)} of {split}_targets"
            raise UserError(f"{raw}: got {rows}, expected as many of each")
    if "task" in headers and headers["task"].size != 1:
        raise UserError(f"{raw}: task has shape {list(headers['task'].shape)}, expected a name")


def _check_owners(headers: dict[str, np.ndarray], raw: Path, train: str, test: str) -> None:
    for owners, rows, kind in (("train_clients", train, "training"), ("test_clients", test, "test")):
        if owners in headers and headers[owners].shape != headers[rows].shape[:1]:
            shape, what = list(headers[owners].shape), "image" if "images" in rows else "row"
            raise UserError(f"{raw}: {owners} has shape {shape}, expected one owner per {kind} {what}")
    if "test_clients" in headers and "train_clients" not in headers:
        raise UserError(f"{raw}: got test_clients alone, expected train_clients, too")
    if (names := headers.get("class_names")) is not None and names.ndim != 1:
        raise UserError(f"{raw}: class_names has shape {list(names.shape)}, expected a list")


def channels_last(images: np.ndarray) -> np.ndarray:
    return images[..., np.newaxis] if images.ndim == 3 else images
