"""Any folder of images.

    ROOT/CLASS/IMAGE                   a share of every class is taken for testing
    ROOT/train/CLASS/IMAGE             ROOT/test/CLASS/IMAGE   (or ROOT/val/)
    ROOT/train/CLIENT/CLASS/IMAGE      the same, with owners, who are the clients;
                                       ROOT/test/CLIENT/CLASS/IMAGE: test images of their own

Classes are numbered in the order of their names. Images have one size, or are resized to one; they are
stored as one channel if every one is grey, otherwise as RGB.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from ...support.errors import UserError
from ...support.processes import usable_cores
from ..checksums import sha256
from .base import ArraySet, ImageSet
from .bounds import empty_images
from .decode import METADATA_BYTES, MODES, bombs_refused, decode_all, decoding, refuse

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
GREY = {"1", "L", "LA"}
DEEPEST = 3  # CLIENT/CLASS/IMAGE
COLOUR = {"RGB", "RGBA", "P", "CMYK", "YCbCr", "PA", "RGBX"}
ORIENTATION, TURNED = 0x0112, range(5, 9)  # the EXIF tag, and its values that exchange height and width
TEST_SHARE, TEST_SEED = 0.1, 0  # not the partition's seed: all partitions of a folder have the same test images
BY_CONTENT = "contents:"  # begins the fingerprint of a folder; those of version 1.0.0 were of names and sizes
# Of a photo that is resized: Pillow's limit, beyond which it is refused, times four channels.
MOST_BYTES = METADATA_BYTES + 4 * 89_478_485


def load_imagefolder(
    raw: Path, workers: int = 0, resize: int = 0, test_share: float | None = None, classes: Sequence[str] = ()
) -> ImageSet | ArraySet:
    """``resize`` 0: images as they are, of one size. ``test_share``: of the images, where there is no test folder.

    ``classes``: a list of which there may be images of some only, rather than the names of all folders.
    """
    train_root, test_root = roots(raw)
    if test_root is not None and test_share is not None:
        raise UserError(f"--test-share has no effect: the test images are in {test_root}: leave it out")
    train, test = files_of(train_root), [] if test_root is None else files_of(test_root)
    depth = {len(file.parts) for file in train}
    if depth not in ({2}, {3}):
        raise UserError(
            f"{train_root}: images at different depths, expected all as CLASS/IMAGE or all as CLIENT/CLASS/IMAGE"
            if depth != {1}
            else f"{train_root}: images without a class, expected CLASS/IMAGE, one folder for each class"
        )
    if depth == {2}:
        refuse_empty(train_root, {file.parts[0] for file in train})
    own_tests = depth == {3} and bool(test) and len(test[0].parts) == 3
    if odd := next((file for file in test if len(file.parts) != 2 + own_tests), None):
        expected = "CLIENT/CLASS/IMAGE, as the others" if own_tests else "CLASS/IMAGE"
        raise UserError(f"{raw}: got test image {odd}, expected {expected}")
    if own_tests and (unknown := next(iter(sorted({f.parts[0] for f in test} - {f.parts[0] for f in train})), None)):
        known = ", ".join(sorted({file.parts[0] for file in train})[:10])
        raise UserError(f"{raw}: test images of {unknown!r}, who has no training images, expected one of {known}")
    names = [*classes] or sorted({file.parts[-2] for file in train})
    number = {name: label for label, name in enumerate(names)}
    if unknown := next((file.parts[-2] for file in train if file.parts[-2] not in number), None):
        raise UserError(f"{raw}: got class {unknown!r}, expected one of --classes: {', '.join(names[:10])}")
    if unknown := next((file.parts[-2] for file in test if file.parts[-2] not in number), None):
        raise UserError(
            f"{raw}: test class {unknown!r} has no training images, expected one of {', '.join(names[:10])}"
        )
    labels, test_labels = (np.array([number[f.parts[-2]] for f in part], dtype=np.int64) for part in (train, test))
    owners = np.array([file.parts[0] for file in train]) if depth == {3} else None
    paths, test_paths = [str(train_root / f) for f in train], [str((test_root or raw) / f) for f in test]
    share = 0.0
    if test_root is None:
        share = TEST_SHARE if test_share is None else test_share
        kept, held = split(share, labels, names, raw, all_classes=not classes)
        if owners is not None and (lost := np.setdiff1d(owners, owners[kept])).size:
            raise UserError(f"--test-share: got {share:g}, which leaves owner {lost[0]} no training image: give less")
        test_paths, paths = [paths[i] for i in held], [paths[i] for i in kept]
        labels, test_labels, owners = labels[kept], labels[held], None if owners is None else owners[kept]
    shape = common_shape(paths + test_paths, workers, resize)
    images, test_images = (empty_images(len(part), shape, raw) for part in (paths, test_paths))
    for part, out, name in ((paths, images, "training images"), (test_paths, test_images, "test images")):
        fit, most = (photo, MOST_BYTES) if resize else (upright, 0)
        decode_all(part, out, workers=workers, name=name, fit=fit, most=most)
    if own_tests:
        test_owners = np.array([file.parts[0] for file in test])
        return ArraySet(images, labels, test_images, test_labels, owners, test_owners, names, image=True)
    return ImageSet(images, labels, test_images, test_labels, names, owners, test_share=share)


def roots(raw: Path) -> tuple[Path, Path | None]:
    """The folders of the training and the test split; None where there is no test folder."""
    test = next((raw / name for name in ("test", "val") if (raw / name).is_dir()), None)
    if (raw / "train").is_dir():
        return raw / "train", test
    if test is not None:
        raise UserError(f"{raw}: a folder {test.name}/ but no folder train/, expected both, or CLASS/IMAGE alone")
    return raw, None


def files_of(root: Path) -> list[Path]:
    """The image files of a split, relative to its folder."""
    files = sorted(image_files(root), key=lambda file: file.parts)
    if not files:
        raise UserError(
            f"{root}: no images{_others(root)}, expected {root.name}/CLASS/IMAGE with one of {' '.join(SUFFIXES)}"
        )
    return files


def refuse_empty(root: Path, classes: set[str]) -> None:
    """A class whose images are all of another type would otherwise go missing without a word."""
    with os.scandir(root) as items:
        folders = sorted(item.name for item in items if item.is_dir() and not _hidden(item.name))
    if empty := next((name for name in folders if name not in classes), None):
        raise UserError(
            f"{root / empty}: no images{_others(root / empty)}, expected {' '.join(SUFFIXES)}: convert them, or "
            "remove the folder"
        )


def _others(root: Path) -> str:
    """`` among 12 files (.heic, .txt)``, if there are any."""
    found = Counter(path.suffix.lower() or path.name for path in root.rglob("*") if path.is_file())
    kinds = ", ".join(kind for kind, _ in found.most_common(3))
    return f" among {found.total()} files ({kinds})" if found else ""


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def image_files(root: Path, within: Path = Path(), around: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The image files, relative to ``root``; links are followed, unless they lead back to a folder around them."""
    folder = root / within
    around = (*around, folder.resolve())
    with os.scandir(folder) as items:
        for item in items:
            if _hidden(item.name):
                continue
            if item.is_dir():
                if (target := Path(item).resolve()) in around:
                    raise UserError(f"{item.path}: links lead back to {target}, which it is in: remove them")
                # Down to one folder more than images may be in, where they are refused.
                if len(around) <= DEEPEST:
                    yield from image_files(root, within / item.name, around)
            elif item.name.lower().endswith(SUFFIXES):
                if not item.is_file():
                    raise UserError(f"{item.path}: not a regular file or a link to one, expected an image: remove it")
                yield within / item.name


def split(
    share: float, labels: np.ndarray, names: list[str], raw: Path, all_classes: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The images for training and those for testing: of every class this share, and at least one of each.

    A single image of a class is for training, unless there must be some of ``all_classes``.
    """
    random, held = np.random.RandomState(TEST_SEED), []
    for label, name in enumerate(names):
        members = np.flatnonzero(labels == label)
        if len(members) < 2 and not all_classes:
            continue
        if len(members) < 2:
            raise UserError(
                f"{raw}: class {name!r} has one image, expected at least 2, one of them for testing: add some, or "
                "give a folder test/ next to train/"
            )
        count = min(max(1, round(share * len(members))), len(members) - 1)
        held.append(random.permutation(members)[:count])
    chosen = np.sort(np.concatenate([np.empty(0, np.int64), *held]))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def common_shape(paths: list[str], workers: int, resize: int) -> tuple[int, int, int]:
    """Size and channels from the headers alone, so that an odd size is reported before anything is decoded."""
    with bombs_refused(), ThreadPoolExecutor(workers or usable_cores()) as pool:
        headers = list(tqdm(pool.map(header, paths), "looking at images", len(paths), unit=" images", disable=None))
    refuse({path: found for path, found in zip(paths, headers, strict=True) if isinstance(found, str)}, len(paths))
    good = [found for found in headers if not isinstance(found, str)]
    channels = 1 if all(mode in GREY for _, _, mode in good) else 3
    if resize:
        return resize, resize, channels
    height, width, _ = good[0]
    for path, (h, w, _) in zip(paths, good, strict=True):
        if (h, w) != (height, width):
            raise UserError(
                f"{path}: image of {h}x{w} among images of {height}x{width}, expected one size: add --resize 32"
            )
    return height, width, channels


def header(path: str) -> tuple[int, int, str] | str:
    """Height, width and pixel mode, or why the image is refused."""
    from PIL import Image

    try:
        with decoding(path), Image.open(path) as image:
            if wide := _wide(image):
                raise UserError(f"{path}: {wide}")
            height, width = image.height, image.width
            if image.getexif().get(ORIENTATION) in TURNED:
                height, width = width, height
            return height, width, image.mode
    except UserError as error:
        return str(error)


def _wide(image: Image.Image) -> str:
    """Why an image is refused whose pixels lose what they say in 8 bits; empty for others."""
    if image.mode in GREY | COLOUR:
        return ""
    return f"pixels of mode {image.mode!r}, expected 8 bits per channel: convert it first"


def upright(image: Image.Image, shape: tuple[int, ...]) -> Image.Image:
    """The image as it was held when it was taken, in the mode of the data set; on white, where it is transparent."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(MODES[shape[2]])


def photo(image: Image.Image, shape: tuple[int, ...]) -> Image.Image:
    """The middle of the upright image, as large as its shorter side allows, resized to the data set's size."""
    from PIL import Image, ImageOps

    if wide := _wide(image):
        raise UserError(wide)
    image = upright(image, shape)
    height, width = shape[:2]
    return image if image.size == (width, height) else ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)


def read_photos(paths: Sequence[str], shape: tuple[int, ...]) -> np.ndarray:
    """Image files as images of a data set, [n, H, W, C]."""
    out = empty_images(len(paths), shape, f"{len(paths)} images")
    decode_all(paths, out, fit=photo, most=MOST_BYTES)
    return out


def fingerprint(raw: Path, like: str = "") -> str:
    """A hash of file names and contents; of names and sizes where ``like``, which it is compared with, is one."""
    files = {
        root / file: f"{'' if root == raw else f'{root.name}/'}{file.as_posix()}"
        for root in filter(None, roots(raw))
        for file in sorted(image_files(root), key=lambda file: file.parts)
    }
    by_size, digest = bool(like) and not like.startswith(BY_CONTENT), hashlib.sha256()
    with ThreadPoolExecutor(usable_cores()) as pool:  # hashlib releases the interpreter lock
        each = pool.map(os.path.getsize if by_size else sha256, files)
        found = [*tqdm(each, "hashing", len(files), unit=" images", disable=None)]
    for name, what in zip(files.values(), found, strict=True):
        digest.update(f"{name}\0{what}\n".encode(errors="surrogateescape"))
    return digest.hexdigest() if by_size else BY_CONTENT + digest.hexdigest()
