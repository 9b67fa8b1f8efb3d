"""CIFAR-10 and CIFAR-100 from their official python archives, or the folders these unpack to.

Each batch is a pickle. Its md5 is checked first, and then it is read by an unpickler that accepts
numpy arrays and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import lzma
import pickle
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ...support.errors import UserError
from .base import ImageSet
from .bounds import Decompressed, check_size, read_file


@dataclass(frozen=True)
class Official:
    """The official files of a data set, each with its md5."""

    archive: str
    folder: str
    train: dict[str, str]
    test: dict[str, str]
    names: tuple[str, ...]
    label_key: str
    images_per_file: tuple[int, int]

    @property
    def most_bytes(self) -> int:
        """More than any of its files has: pixels, a label and a file name for each image."""
        return max(self.images_per_file) * 4096 + (1 << 16)


CIFAR10 = Official(
    archive="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    label_key="labels",
    images_per_file=(10_000, 10_000),
)

# fmt: off
CIFAR100_NAMES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)
# fmt: on

CIFAR100 = Official(
    archive="cifar-100-python.tar.gz",
    folder="cifar-100-python",
    train={"train": "16019d7e3df5f24257cddd939b257f8d"},
    test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    names=CIFAR100_NAMES,
    label_key="fine_labels",
    images_per_file=(50_000, 10_000),
)


class ArrayUnpickler(pickle.Unpickler):
    """Builds dicts, lists, text, numbers and numpy arrays; any other global is refused."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        if name == "_reconstruct":
            return np.ndarray.__reduce__(np.empty(0))[0]
        return getattr(np, name)


def load_cifar10(raw: Path, workers: int = 1) -> ImageSet:
    return load_official(CIFAR10, raw)


def load_cifar100(raw: Path, workers: int = 1) -> ImageSet:
    return load_official(CIFAR100, raw)


def load_official(official: Official, raw: Path) -> ImageSet:
    """``raw`` is the archive, the unpacked folder, or a folder that holds one of them."""
    files = {**official.train, **official.test}
    path = locate(official, raw)
    contents = read_folder(path, files, official.most_bytes) if path.is_dir() else read_archive(path, official, files)
    # One allocation per split; batches are decoded into their place and then freed.
    train_images, train_labels = _decode(official, contents, official.train, official.images_per_file[0])
    test_images, test_labels = _decode(official, contents, official.test, official.images_per_file[1])
    return ImageSet(train_images, train_labels, test_images, test_labels, list(official.names))


def locate(official: Official, raw: Path) -> Path:
    """The archive or the unpacked folder at or in ``raw``."""
    if raw.is_file():
        return raw
    if all((raw / name).is_file() for name in official.test):
        return raw
    for candidate in (raw / official.folder, raw / official.archive):
        if candidate.exists():
            return candidate
    raise UserError(f"no {official.archive} or {official.folder}/ in {raw}: give one of them with --raw")


def read_folder(folder: Path, files: dict[str, str], most: int) -> dict[str, bytes]:
    contents = {}
    for name, md5 in files.items():
        try:
            contents[name] = checked(read_file(folder / name, most), md5, folder / name)
        except FileNotFoundError:
            raise UserError(
                f"{folder}: {name} is missing, expected {', '.join(files)}: unpack the archive again"
            ) from None
    return contents


def read_archive(archive: Path, official: Official, files: dict[str, str]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    folder, most = official.folder, official.most_bytes
    try:
        # A stream never seeks back, so the archive is decompressed only once.
        with (
            contextlib.closing(Decompressed(archive, (len(files) + 1) * most)) as stream,
            tarfile.open(fileobj=cast(BinaryIO, stream), mode="r|") as tar,
        ):
            for member in tar:
                check_size(member.size, most, f"{archive}: {member.name}")
                directory, _, name = member.name.removeprefix("./").partition("/")
                if directory == folder and name in files and (file := tar.extractfile(member)):
                    contents[name] = checked(file.read(), files[name], f"{archive}: {member.name}")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise UserError(
            f"{archive}: truncated or not a tar archive ({error}), expected the official one: download it again"
        ) from None
    missing = [name for name in files if name not in contents]
    if missing:
        raise UserError(
            f"{archive}: {folder}/{missing[0]} is missing, expected the official archive: download it again"
        )
    return contents


def checked(content: bytes, md5: str, where: object) -> bytes:
    """The content, if its md5 is right."""
    # Not a protection against forgery: these are the checksums that the data set's authors published.
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise UserError(f"{where}: md5 is {actual}, expected {md5}: download the archive again")
    return content


def _decode(
    official: Official, contents: dict[str, bytes], names: dict[str, str], each: int
) -> tuple[np.ndarray, np.ndarray]:
    images = np.empty((each * len(names), 32, 32, 3), dtype=np.uint8)
    labels = np.empty(len(images), dtype=np.int64)
    for number, name in enumerate(names):
        part = slice(number * each, (number + 1) * each)
        try:
            batch = ArrayUnpickler(io.BytesIO(contents.pop(name)), encoding="latin1").load()
            # Stored as rows of all red, then all green, then all blue pixels.
            images[part] = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            labels[part] = batch[official.label_key]
        except (pickle.UnpicklingError, KeyError, TypeError, ValueError, AttributeError, IndexError, EOFError) as error:
            raise UserError(f"{name}: not a batch of {official.folder} ({error}): download the archive again") from None
    return images, labels
