"""TinyImageNet-200 from its official zip or the folder that it unpacks to; the validation split is the test set."""

from __future__ import annotations

import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from ...support.errors import UserError
from .base import KNOWN, ImageSet
from .bounds import ZIP_ERRORS, empty_images, read_file, read_member
from .decode import decode_all

FOLDER = "tiny-imagenet-200"
TEXT_BYTES = 16 << 20  # words.txt, the longest of its lists, has 2.7 MB
URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


class UnpackedTree:
    """The files in the unpacked folder."""

    archive = None

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str) -> bytes:
        return read_file(self.root / name, TEXT_BYTES)

    def files(self, folder: str) -> list[str]:
        return [path.name for path in (self.root / folder).glob("*.JPEG")]

    def path(self, name: str) -> str:
        return str(self.root / name)


class ZipTree:
    """The files in the official zip."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        try:
            self.zip = zipfile.ZipFile(archive)
        except ZIP_ERRORS as error:
            raise UserError(
                f"{archive}: truncated or not a zip ({error}), expected {FOLDER}.zip: download {URL} again"
            ) from None
        self.by_folder: dict[str, list[str]] = defaultdict(list)
        for name in self.zip.namelist():
            folder, _, file = name.rpartition("/")
            self.by_folder[folder].append(file)

    def read(self, name: str) -> bytes:
        return read_member(self.zip, self.path(name), TEXT_BYTES)

    def files(self, folder: str) -> list[str]:
        return [name for name in self.by_folder[self.path(folder)] if name.endswith(".JPEG")]

    def path(self, name: str) -> str:
        return f"{FOLDER}/{name}"


Tree = UnpackedTree | ZipTree


def open_tree(raw: Path) -> Tree:
    """The data at or in ``raw``."""
    if raw.is_file():
        return ZipTree(raw)
    if (raw / FOLDER).is_dir():
        return UnpackedTree(raw / FOLDER)
    if (raw / f"{FOLDER}.zip").is_file():
        return ZipTree(raw / f"{FOLDER}.zip")
    return UnpackedTree(raw)


def read_lines(tree: Tree, name: str) -> list[str]:
    try:
        return tree.read(name).decode().splitlines()
    except (KeyError, FileNotFoundError):
        raise UserError(f"{tree.path(name)} is missing, expected {FOLDER} as it comes from {URL}") from None
    except ZIP_ERRORS as error:
        raise UserError(f"{tree.path(name)} cannot be read ({error}): download {URL} again") from None


def load_tinyimagenet(raw: Path, workers: int = 0) -> ImageSet:
    tree = open_tree(raw)
    wnids = sorted(filter(None, read_lines(tree, "wnids.txt")))
    names = dict(line.split("\t", 1) for line in read_lines(tree, "words.txt") if "\t" in line)
    train = training_files(tree, wnids)
    test = validation_files(tree, wnids)
    return ImageSet(
        *decode_labelled(tree, train, workers, "training images"),
        *decode_labelled(tree, test, workers, "validation images"),
        class_names=[names.get(wnid, wnid).split(",")[0] for wnid in wnids],
    )


def training_files(tree: Tree, wnids: list[str]) -> list[tuple[str, int]]:
    """Names and labels, class by class."""
    labelled = []
    for label, wnid in enumerate(wnids):
        folder = f"train/{wnid}/images"
        # Shorter first is numeric order (_0, _1, ..., _10), the same for a zip and for any file system.
        files = sorted(tree.files(folder), key=lambda name: (len(name), name))
        if not files:
            raise UserError(f"{tree.path(folder)}: no .JPEG images, expected {FOLDER} as it comes from {URL}")
        labelled += [(f"{folder}/{name}", label) for name in files]
    return labelled


def validation_files(tree: Tree, wnids: list[str]) -> list[tuple[str, int]]:
    """Names and labels in the order of val_annotations.txt: name, wnid, then a bounding box."""
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    annotations = "val/val_annotations.txt"
    labelled = []
    for number, line in enumerate(read_lines(tree, annotations), start=1):
        name, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0]
        if wnid not in label_of:
            raise UserError(f"{tree.path(annotations)} line {number}: got class {wnid!r}, expected one of wnids.txt")
        labelled.append((f"val/images/{name}", label_of[wnid]))
    if not labelled:
        raise UserError(f"{tree.path(annotations)} is empty, expected a line for each validation image")
    return labelled


def decode_labelled(tree: Tree, files: list[tuple[str, int]], workers: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    images = empty_images(len(files), KNOWN["tinyimagenet"].shape, tree.path(""))
    decode_all([tree.path(file) for file, _ in files], images, tree.archive, workers, name)
    return images, np.array([label for _, label in files], dtype=np.int64)
