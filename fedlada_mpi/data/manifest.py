"""The manifest of a directory of shards: what it says is checked in full before anything is read on its word."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import reprlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..support.errors import UserError
from ..support.inputs import read_bytes
from .partition import KINDS, Rule

FORMAT = 1
MANIFEST = "manifest.json"
TEST_FILE = "test.h5"
ARRAYS = "arrays"  # the name of data that was given from Python
RAW_PATH = "raw_path"  # where the raw data was; not in the manifest, which is the same on every machine
VALIDATION_FILE = "validation.h5"  # only where a share of the training images was held out
PREPARE_AGAIN = ": run python -m data_prep again with --force"
MANY = 1 << 40  # more images, bytes or pixels than any data set has, and still safe to add and multiply


@dataclass(frozen=True, eq=False)
class Manifest:
    """The contents of a directory of shards. Silos are numbered from 0 here, their files from 1."""

    root: Path
    dataset: str
    classes: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_shape: tuple[int, int, int]
    clients: int
    silos: int
    sizes: np.ndarray
    counts: np.ndarray
    client_ids: tuple[np.ndarray, ...]
    client_names: tuple[str, ...]
    partition: dict[str, Any]
    seed: int
    source: str
    files: dict[str, dict[str, Any]]
    client_sha256: tuple[str, ...]
    validation: float  # the share of the training images that was held out
    resize: int  # pixels of a side that the images were resized to; 0 where they were not
    test_share: float  # the share of the images that became the test set; 0 where the data has one

    @property
    def raw(self) -> Path | None:
        """The raw data that these shards were prepared from, as it was given, if it is still there."""
        try:
            raw = Path(os.fsdecode(read_bytes(self.root / RAW_PATH)))
            return raw if raw.is_file() or raw.is_dir() else None
        except (OSError, ValueError):
            return None

    @property
    def digest(self) -> str:
        """Identifies the data of clients, test and validation, wherever it lies and however many silos hold it."""
        # The test file has the settings, too. Shards of version 0.1 have no checksums of clients.
        clients = self.client_sha256 or [self.files[silo_file(silo)]["sha256"] for silo in range(self.silos)]
        sets = [self.files[name]["sha256"] for name in (TEST_FILE, VALIDATION_FILE) if name in self.files]
        return hashlib.sha256("\n".join([*clients, *sets]).encode()).hexdigest()

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each client: its silo, and its place among the clients of the silo's file."""
        silo_of, place_of = np.empty(self.clients, np.int64), np.empty(self.clients, np.int64)
        for silo, ids in enumerate(self.client_ids):
            silo_of[ids], place_of[ids] = silo, np.arange(len(ids))
        return silo_of, place_of

    @property
    def about_images(self) -> dict[str, Any]:
        """What a model needs to know of its images and classes."""
        return {
            "image_shape": list(self.image_shape),
            "mean": list(self.mean),
            "std": list(self.std),
            "class_names": list(self.class_names),
        }

    @property
    def command(self) -> str:
        """The command that prepares these shards again."""
        if self.dataset == ARRAYS:
            return f"rm -r {shlex.quote(str(self.root))} and fedlada_mpi.train(data=...)"
        rule = {field.name: self.partition.get(field.name) for field in fields(Rule)}
        options = {"clients": self.clients, "silos": self.silos, **rule, "seed": self.seed}
        options |= {"validation": self.validation, "resize": self.resize, "test_share": self.test_share}
        return prepare_command(self.dataset, self.root, options, self.raw) + " --force"


def silo_file(silo: int) -> str:
    return f"silo_{silo + 1:04d}.h5"


def prepare_command(dataset: str, out: str | Path, options: Mapping[str, Any], raw: Path | None = None) -> str:
    """The data_prep command with these settings, named as in a manifest; those that are unset are left out."""
    words = ["python", "-m", "data_prep", "--dataset", dataset]
    words += ["--raw", "PATH" if raw is None else str(raw)] * (dataset != "digits") + ["--out", str(out)]
    for name, value in options.items():
        if value is not None and (name not in ("size_sigma", "validation", "resize", "test_share") or value):
            text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
            words += ["--" + {"kind": "partition"}.get(name, name).replace("_", "-"), text]
    return shlex.join(words)


def data_root(data_dir: str = "") -> Path:
    """Where shards are, unless a directory is given."""
    return Path(data_dir or os.environ.get("FEDLADA_DATA") or "data")


def read_manifest(directory: str | os.PathLike) -> Manifest:
    path = Path(directory) / MANIFEST
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file, expected a manifest of shards{PREPARE_AGAIN}")
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise UserError(
            f"no {MANIFEST} in {directory}: prepare shards with python -m data_prep --out {directory}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return _parsed(text, path)


@lru_cache(maxsize=1)  # a run reads it several times, and that of 100,000 clients takes a second
def _parsed(text: str, path: Path) -> Manifest:
    try:
        data = _mapping(json.loads(text), "the manifest")
        check_format(data.get("format"), path)
        return _manifest(data, path.parent)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a manifest of shards ({error}){PREPARE_AGAIN}") from None


def check_format(version: object, path: Path) -> None:
    if version != FORMAT:
        raise UserError(f"{path}: shards of format {_short(version)}, expected format {FORMAT}{PREPARE_AGAIN}")


def _manifest(data: dict[str, Any], root: Path) -> Manifest:
    """Every field in its type and range, and the fields in agreement with one another."""

    def field(name: str, check: Callable[..., Any], *arguments: Any) -> Any:
        return check(data.get(name), f"'{name}'", *arguments)

    dataset = field("dataset", _text)
    if not re.fullmatch(r"[\w.-]{1,64}", dataset):
        raise ValueError(f"'dataset' is {_short(dataset)}, expected a name")
    classes, clients = field("classes", _integer, 1), field("clients", _integer, 1)
    silos = field("silos", _integer, 1, clients)
    shape = field("image_shape", _list, _integer, (3,), 1)
    mean, std = (field(name, _list, _number, (shape[2],)) for name in ("mean", "std"))
    if min(std) <= 0:
        raise ValueError(f"'std' is {_short(std)}, expected more than 0")
    counts = _counts(data.get("counts"), clients, classes)
    sizes = counts.sum(axis=1)
    names = [silo_file(silo) for silo in range(silos)]
    validation = _number(data.get("validation", 0.0), "'validation'")
    if not 0 <= validation < 1:
        raise ValueError(f"'validation' is {_short(validation)}, expected a share of the training images")
    test_share = _number(data.get("test_share", 0.0), "'test_share'")
    if not 0 <= test_share < 1:
        raise ValueError(f"'test_share' is {_short(test_share)}, expected a share of the images")
    sets = [TEST_FILE, VALIDATION_FILE] if validation else [TEST_FILE]
    files = _files(data.get("files"), names, sets, image_bytes=math.prod(shape) + 8)
    client_ids = tuple(np.array(files[name]["client_ids"], np.int64) for name in names)
    if not np.array_equal(np.sort(np.concatenate(client_ids)), np.arange(clients)):
        raise ValueError(f"the 'client_ids' of its files are not each of 0 to {clients - 1} once")
    for name, ids in zip(names, client_ids, strict=True):
        if sizes[ids].sum() != files[name]["images"]:
            raise ValueError(f"{name} has {files[name]['images']} images, but 'counts' add up to {sizes[ids].sum()}")
    return Manifest(
        root=root,
        dataset=dataset,
        classes=classes,
        class_names=tuple(field("class_names", _list, _text, (classes,))),
        mean=tuple(mean),
        std=tuple(std),
        image_shape=(shape[0], shape[1], shape[2]),
        clients=clients,
        silos=silos,
        sizes=sizes,
        counts=counts,
        client_ids=client_ids,
        client_names=tuple(field("client_names", _list, _text, (0, clients))),
        partition=_rule(data.get("partition")),
        seed=field("seed", _integer, 0, 2**32 - 1),
        source=field("source", _text),
        files=files,
        client_sha256=tuple(_list(data.get("client_sha256", []), "'client_sha256'", _checksum, (0, clients))),
        validation=validation,
        resize=_integer(data.get("resize", 0), "'resize'"),
        test_share=test_share,
    )


def _counts(value: object, clients: int, classes: int) -> np.ndarray:
    """Images per client and class."""
    rows = _list(value, "'counts'", _sequence, (clients,), classes)
    counts = np.array(rows)
    if counts.shape != (clients, classes) or counts.dtype.kind != "i" or counts.min() < 0 or counts.max() > MANY:
        raise ValueError(f"'counts' are not {clients} rows of {classes} numbers of images")
    return counts.astype(np.int64)


def _files(value: object, silo_names: list[str], sets: list[str], image_bytes: int) -> dict[str, dict[str, Any]]:
    """The entries of exactly these files."""
    files, expected = _mapping(value, "'files'"), [*silo_names, *sets]
    if set(files) != set(expected):
        odd = sorted(set(files).symmetric_difference(expected))[0]
        raise ValueError(f"'files' are not {silo_names[0]} to {silo_names[-1]} and {' and '.join(sets)}: {_short(odd)}")
    for name, entry in files.items():
        entry = _mapping(entry, name)
        _checksum(entry.get("sha256"), f"the 'sha256' of {name}")
        images = _integer(entry.get("images"), f"the 'images' of {name}", 1)
        # Memory is taken for this many images, so the file must be large enough to have them.
        _integer(entry.get("bytes"), f"the 'bytes' of {name}", images * image_bytes)
        if name in silo_names:
            _list(entry.get("client_ids"), f"the 'client_ids' of {name}", _integer, ())
    return files


def _rule(value: object) -> dict[str, Any]:
    rule = _mapping(value, "'partition'")
    if rule.get("kind") not in KINDS:
        raise ValueError(f"the partition's 'kind' is {_short(rule.get('kind'))}, expected one of {', '.join(KINDS)}")
    if rule.get("exhausted") not in (None, "refill", "exact"):
        raise ValueError(f"the partition's 'exhausted' is {_short(rule['exhausted'])}, expected refill or exact")
    for name, check in (("dirichlet", _number), ("size_sigma", _number), ("classes_per_client", _integer)):
        if rule.get(name) is not None:
            check(rule[name], f"the partition's {name!r}")
    return rule


# One check per type of JSON: returns the value, or raises ValueError with what it is and what was expected.


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_short(value)}, expected an object")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {_short(value)}, expected text")
    return value


def _checksum(value: object, what: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", _text(value, what)):
        raise ValueError(f"{what} is {_short(value)}, expected 64 hexadecimal digits")
    return str(value)


def _integer(value: object, what: str, least: int = 0, most: int = MANY) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{what} is {_short(value)}, expected an integer from {least} to {most}")
    return value


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MANY:
        raise ValueError(f"{what} is {_short(value)}, expected a number")
    return value


def _sequence(value: object, what: str, *lengths: int) -> list[Any]:
    """A list of one of these lengths, or without any a list that is not empty."""
    if not isinstance(value, list) or (len(value) not in lengths if lengths else not value):
        expected = " or ".join(map(str, lengths)) or "one or more"
        raise ValueError(f"{what} is {_short(value)}, expected a list of {expected}")
    return value


def _list(value: object, what: str, check: Callable[..., Any], lengths: tuple[int, ...], *arguments: Any) -> list[Any]:
    """Such a list whose elements all pass ``check``."""
    return [check(item, f"an element of {what}", *arguments) for item in _sequence(value, what, *lengths)]


def _short(value: object) -> str:
    """The value in a few words on one line."""
    return reprlib.repr(value)
