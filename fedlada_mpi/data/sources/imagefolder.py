"""Any folder of images.

    ROOT/train/CLASS/IMAGE             ROOT/test/CLASS/IMAGE   (or ROOT/val/)
    ROOT/train/CLIENT/CLASS/IMAGE      the same, with owners for ``--partition natural``

Classes are numbered in the order of their names. All images have one size; they are stored as one
channel if every one is grey, otherwise as RGB.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from ...errors import UserError
from ...processes import usable_cores
from .base import ImageSet
from .bounds import empty_images
from .decode import bombs_refused, decode_all, decoding

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
GREY = {"1", "L", "LA"}
DEEPEST = 3  # CLIENT/CLASS/IMAGE
COLOUR = {"RGB", "RGBA", "P", "CMYK", "YCbCr", "PA", "RGBX"}


def load_imagefolder(raw: Path, workers: int = 0) -> ImageSet:
    train, test = split_files(raw)
    depth = {len(file.parts) for file in train}
    if depth not in ({2}, {3}):
        raise UserError(
            f"{raw}/train: images at different depths, expected all as CLASS/IMAGE or all as CLIENT/CLASS/IMAGE"
        )
    if odd := next((file for file in test if len(file.parts) != 2), None):
        raise UserError(f"{raw}: got test image {odd}, expected CLASS/IMAGE")
    names = sorted({file.parts[-2] for file in train})
    number = {name: label for label, name in enumerate(names)}
    if unknown := next((file.parts[0] for file in test if file.parts[0] not in number), None):
        raise UserError(
            f"{raw}: test class {unknown!r} has no training images, expected one of {', '.join(names[:10])}"
        )
    paths = [[str(root / file) for file in files] for root, files in zip(roots(raw), (train, test), strict=True)]
    shape = common_shape(paths[0] + paths[1], workers)
    images = [empty_images(len(part), shape, raw) for part in paths]
    for part, out, name in zip(paths, images, ("training images", "test images"), strict=True):
        decode_all(part, out, workers=workers, name=name)
    return ImageSet(
        images[0],
        np.array([number[file.parts[-2]] for file in train], dtype=np.int64),
        images[1],
        np.array([number[file.parts[-2]] for file in test], dtype=np.int64),
        names,
        np.array([file.parts[0] for file in train]) if depth == {3} else None,
    )


def roots(raw: Path) -> tuple[Path, Path]:
    """The folders of the training and the test split."""
    test = raw / "test"
    return raw / "train", test if test.is_dir() else raw / "val"


def split_files(raw: Path) -> list[list[Path]]:
    """The image files of both splits, relative to their split's folder."""
    splits = []
    for root in roots(raw):
        if not root.is_dir():
            raise UserError(f"{raw}: no folder {root.name}/, expected train/ and test/ (or val/)")
        files = sorted(image_files(root), key=lambda file: file.parts)
        if not files:
            raise UserError(f"{root}: no images, expected {root.name}/CLASS/IMAGE with one of {' '.join(SUFFIXES)}")
        splits.append(files)
    return splits


def image_files(root: Path, within: Path = Path(), around: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The image files, relative to ``root``; links are followed, unless they lead back to a folder around them."""
    folder = root / within
    around = (*around, folder.resolve())
    with os.scandir(folder) as items:
        for item in items:
            if item.is_dir():
                if (target := Path(item).resolve()) in around:
                    raise UserError(f"{item.path}: links lead back to {target}, which it is in: remove them")
                # Down to one folder more than images may be in, where they are refused.
                if len(around) <= DEEPEST:
                    yield from image_files(root, within / item.name, around)
            elif item.name.lower().endswith(SUFFIXES) and not item.name.startswith("."):
                if not item.is_file():
                    raise UserError(f"{item.path}: not a regular file or a link to one, expected an image: remove it")
                yield within / item.name


def common_shape(paths: list[str], workers: int) -> tuple[int, int, int]:
    """Size and channels from the headers alone, so that an odd size is reported before anything is decoded."""
    with bombs_refused(), ThreadPoolExecutor(workers or usable_cores()) as pool:
        headers = list(pool.map(header, paths))
    height, width, _ = headers[0]
    for path, (h, w, _) in zip(paths, headers, strict=True):
        if (h, w) != (height, width):
            raise UserError(
                f"{path}: image of {h}x{w} among images of {height}x{width}, expected one size: resize them first"
            )
    return height, width, 1 if all(mode in GREY for _, _, mode in headers) else 3


def header(path: str) -> tuple[int, int, str]:
    """Height, width and pixel mode."""
    with decoding(path), Image.open(path) as image:
        if image.mode not in GREY | COLOUR:
            raise UserError(f"{path}: pixels of mode {image.mode!r}, expected 8 bits per channel: convert it first")
        return image.height, image.width, image.mode


def fingerprint(raw: Path) -> str:
    """A hash of file names and sizes: changes when the data does, without reading it."""
    digest = hashlib.sha256()
    for root in roots(raw):
        for file in sorted(image_files(root) if root.is_dir() else (), key=lambda file: file.parts):
            line = f"{root.name}/{file.as_posix()}\0{(root / file).stat().st_size}\n"
            digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()
