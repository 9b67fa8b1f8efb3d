"""The manifest of a directory of shards: what it says is checked in full before anything is read on its word."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..settings import SHIPPED
from ..support.errors import UserError
from ..support.inputs import read_bytes
from . import json_checks as checks
from .partition import KINDS, Rule

if TYPE_CHECKING:
    from ..tasks import About

FORMATS = (1, 2)  # uint8 images with one label each; any arrays, and test rows of clients
MANIFEST = "manifest.json"
TEST_FILE = "test.h5"
ARRAYS = "arrays"  # the name of data that was given from Python
RAW_PATH = "raw_path"  # where the raw data was; not in the manifest, which is the same on every machine
VALIDATION_FILE = "validation.h5"  # only where a share of the training images was held out
PREPARE_AGAIN = ": run python -m data_prep again with --force"
DTYPES = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
DTYPES += tuple(f"float{bits}" for bits in (16, 32, 64))
IGNORED = 255  # the pixels of a mask that count for nothing
NORMALISE = ("none", "pooled", "client")
POOLED = ("csv", *SHIPPED)  # normalised so unless told otherwise
MOST_DIMENSIONS = 16
MOST_VALUES = 2**31  # that tokens may have
# What the shards of format 2 contain; every file has a digest of it.
CONTENTS = (
    *("task", "loss", "classes", "class_names", "image", "mean", "std"),
    *("inputs", "targets", "normalise", "edges", "feature_names"),
)
# Options of the raw data's loader, and how their types are checked.
READING = {"target": list, "client": str, "drop": list, "length": int, "task": str, "strata": int}


@dataclass(frozen=True)
class Stored:
    """An array of the shards: the type and the shape of one row, as ``tasks.Array`` has them, and how it is read.

    The first dimension of a ragged one is that of the longest row. Where there are ``mean`` and ``std``, one number or
    one per column, a rank normalises what it loads. ``values``: of integers, one more than the largest; 0 where some
    are negative, and for other types.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    ragged: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    values: int = 0

    @classmethod
    def parsed(cls, described: Mapping[str, Any]) -> dict[str, Stored]:
        """Arrays by name from what ``Manifest.described`` has of them; raises ValueError and the like."""
        return {
            str(name): cls(
                str(np.dtype(each["dtype"])),
                tuple(int(size) for size in each["shape"]),
                bool(each["ragged"]),
                tuple(float(value) for value in each["mean"]),
                tuple(float(value) for value in each["std"]),
                int(each.get("values", 0)),
            )
            for name, each in described.items()
        }

    @property
    def row_bytes(self) -> int:
        """At least so many bytes of a file for every row."""
        return 8 if self.ragged else math.prod(self.shape) * np.dtype(self.dtype).itemsize


def about_of(
    arrays: Mapping[str, Stored],
    targets: Stored,
    classes: int,
    image: bool = False,
    edges: Sequence[float] = (),
) -> About:
    """What a task and a model may know of such arrays."""
    from ..tasks import About, Array  # here: preparing data needs no torch

    def array(stored: Stored) -> Array:
        # What is normalised reaches a model as floating-point numbers.
        if stored.mean:
            return Array("float32", stored.shape)
        return Array(stored.dtype, stored.shape, stored.values)

    inputs = {name: array(stored) for name, stored in arrays.items()}
    single = inputs[""] if [*inputs] == [""] else inputs
    return About(single, array(targets), classes=classes, image=image, edges=tuple(edges))


@dataclass(frozen=True, eq=False)
class Manifest:
    """The contents of a directory of shards. Silos are numbered from 0 here, their files from 1.

    ``counts`` are rows per client and class, without columns where a row has no class. ``image_shape``, ``mean`` and
    ``std`` are those of images, otherwise zeros and empty; arrays that are no images have their own in ``inputs``.
    """

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
    format: int
    inputs: Stored | dict[str, Stored]
    targets: Stored
    test_sizes: np.ndarray  # rows of the clients' own tests
    image: bool
    task: str = "classification"  # what a run learns unless it is told otherwise; "": it must be told
    loss: str = ""
    feature_names: tuple[str, ...] = ()
    normalise: str = "none"
    edges: tuple[float, ...] = ()  # the ends of the bins of time, for survival
    reading: Mapping[str, Any] = field(default_factory=dict)  # options of the raw data's loader
    contents: str = ""  # a digest of what is in the shards of format 2

    @staticmethod
    def file(silo: int) -> str:
        """The name of a silo's file."""
        return silo_file(silo)

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
        clients = self.client_sha256 or [self.files[self.file(silo)]["sha256"] for silo in range(self.silos)]
        sets = [self.files[name]["sha256"] for name in (TEST_FILE, VALIDATION_FILE) if name in self.files]
        # Where clients have their own tests, there may be no test file.
        sets += [self.contents] if self.contents else []
        return hashlib.sha256("\n".join([*clients, *sets]).encode()).hexdigest()

    @property
    def arrays(self) -> dict[str, Stored]:
        """The arrays of the inputs by their names; a single one has the name ""."""
        return self.inputs if isinstance(self.inputs, dict) else {"": self.inputs}

    @property
    def has_floats(self) -> bool:
        return any(stored.dtype.startswith("float") for stored in self.arrays.values())

    @property
    def own_tests(self) -> bool:
        """Whether clients have test rows of their own."""
        return bool(self.test_sizes.any())

    @property
    def labelled(self) -> bool:
        """Whether every row has a class, which ``counts`` counts."""
        return self.task == "classification" and self.counts.size > 0

    def rows(self, name: str) -> int:
        """The rows of a file; of a silo, those for training."""
        return self.files[name]["images" if self.format == 1 else "rows"]

    def about(self) -> About:
        """What a task and a model may know of the data."""
        return about_of(self.arrays, self.targets, self.classes, self.image, self.edges)

    @property
    def described(self) -> dict[str, Any]:
        """What a model needs to know of its inputs and outputs, for the results of a run."""
        if self.image and self.labelled:
            return self.about_images
        return {
            **(self.about_images if self.image else {}),
            "inputs": {name: asdict(stored) for name, stored in self.arrays.items()},
            "targets": asdict(self.targets),
            "classes": self.classes,
            "class_names": list(self.class_names),
            "feature_names": list(self.feature_names),
            "edges": list(self.edges),
            "normalise": self.normalise,
        }

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
        options |= self.reading
        if self.has_floats and self.normalise != ("pooled" if self.dataset in POOLED else "none"):
            options["normalise"] = self.normalise
        return prepare_command(self.dataset, self.root, options, self.raw) + " --force"


M = TypeVar("M", bound=Manifest)


def as_text(name: str) -> str:
    """The name of an owner as files take it: in UTF-8, without NUL; bytes that are no text are escaped, as \\xff."""
    try:
        content = name.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # surrogates that stand for no byte
        content = name.encode(errors="backslashreplace")
    return content.decode(errors="backslashreplace").replace("\0", "\\x00")


def silo_file(silo: int) -> str:
    return f"silo_{silo + 1:04d}.h5"


def prepare_command(dataset: str, out: str | Path, options: Mapping[str, Any], raw: Path | None = None) -> str:
    """The data_prep command with these settings, named as in a manifest; those that are unset are left out."""
    words = ["python", "-m", "data_prep", "--dataset", dataset]
    words += ["--raw", "PATH" if raw is None else str(raw)] * (dataset not in SHIPPED) + ["--out", str(out)]
    for name, value in options.items():
        if value is not None and (name not in ("size_sigma", "validation", "resize", "test_share") or value):
            values = value if isinstance(value, (list, tuple)) else [value]
            texts = [str(int(v) if isinstance(v, float) and v.is_integer() else v) for v in values]
            words += ["--" + {"kind": "partition"}.get(name, name).replace("_", "-"), *texts]
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
        data = checks.mapping(json.loads(text), "the manifest")
        check_format(data.get("format"), path)
        return parsed(data, path.parent, Manifest)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a manifest of shards ({error}){PREPARE_AGAIN}") from None


def check_format(version: object, path: Path) -> None:
    if isinstance(version, bool) or version not in FORMATS:
        expected = " or ".join(map(str, FORMATS))
        raise UserError(f"{path}: shards of format {checks.short(version)}, expected format {expected}{PREPARE_AGAIN}")


def parsed(data: dict[str, Any], root: Path, kind: type[M], **more: Any) -> M:
    """Every field in its type and range, and the fields in agreement with one another; raises ValueError.

    ``more``: what else this kind of manifest has.
    """

    def field(name: str, check: Callable[..., Any], *arguments: Any) -> Any:
        return check(data.get(name), f"'{name}'", *arguments)

    dataset = field("dataset", checks.text)
    if not re.fullmatch(r"[\w.-]{1,64}", dataset):
        raise ValueError(f"'dataset' is {checks.short(dataset)}, expected a name")
    version, clients = data["format"], field("clients", checks.integer, 1)
    silos = field("silos", checks.integer, 1, clients)
    validation = checks.share(data.get("validation", 0.0), "'validation'", "of the training examples")
    test_share = checks.share(data.get("test_share", 0.0), "'test_share'", "of the examples")
    about = (_images if version == 1 else _arrays)(data, clients)
    sizes, test_sizes, names = about["sizes"], about["test_sizes"], [kind.file(silo) for silo in range(silos)]
    files = _files(data.get("files"), names, _sets(data, bool(validation), test_sizes), about, version)
    client_ids = tuple(np.array(files[name]["client_ids"], np.int64) for name in names)
    if not np.array_equal(np.sort(np.concatenate(client_ids)), np.arange(clients)):
        raise ValueError(f"the 'client_ids' of its files are not each of 0 to {clients - 1} once")
    unit, source = ("images", "counts") if version == 1 else ("rows", "sizes")
    for name, ids in zip(names, client_ids, strict=True):
        if sizes[ids].sum() != files[name][unit]:
            raise ValueError(f"{name} has {files[name][unit]} {unit}, but '{source}' add up to {sizes[ids].sum()}")
        # Memory is taken for this many rows, so the file must be large enough to have them.
        rows = int(sizes[ids].sum() + test_sizes[ids].sum())
        checks.integer(files[name]["bytes"], f"the 'bytes' of {name}", rows * _row_bytes(about))
    return kind(
        root=root,
        dataset=dataset,
        clients=clients,
        silos=silos,
        client_ids=client_ids,
        client_names=tuple(map(as_text, field("client_names", checks.items, checks.text, (0, clients)))),
        partition=_rule(data.get("partition")),
        seed=field("seed", checks.integer, 0, 2**32 - 1),
        source=field("source", checks.text),
        files=files,
        client_sha256=tuple(
            checks.items(data.get("client_sha256", []), "'client_sha256'", checks.checksum, (0, clients))
        ),
        validation=validation,
        resize=checks.integer(data.get("resize", 0), "'resize'"),
        test_share=test_share,
        format=version,
        **about,
        **more,
    )


def _images(data: dict[str, Any], clients: int) -> dict[str, Any]:
    """What format 1 says of its images and labels."""
    classes = checks.integer(data.get("classes"), "'classes'", 1)
    shape = checks.items(data.get("image_shape"), "'image_shape'", checks.integer, (3,), 1)
    counts = _counts(data.get("counts"), clients, classes)
    return {
        "classes": classes,
        "class_names": tuple(checks.items(data.get("class_names"), "'class_names'", checks.text, (classes,))),
        **_per_channel(data, shape),
        "sizes": counts.sum(axis=1),
        "counts": counts,
        "inputs": Stored("uint8", tuple(shape)),
        "targets": Stored("int64"),
        "test_sizes": np.zeros(clients, np.int64),
        "image": True,
    }


def _per_channel(data: dict[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    mean, std = (checks.items(data.get(name), f"'{name}'", checks.number, (shape[2],)) for name in ("mean", "std"))
    if min(std) <= 0:
        raise ValueError(f"'std' is {checks.short(std)}, expected more than 0")
    return {"image_shape": (shape[0], shape[1], shape[2]), "mean": tuple(mean), "std": tuple(std)}


def _arrays(data: dict[str, Any], clients: int) -> dict[str, Any]:
    """What format 2 says of its arrays."""

    def field(name: str, check: Callable[..., Any], *arguments: Any) -> Any:
        return check(data.get(name), f"'{name}'", *arguments)

    classes, image, inputs = (
        field("classes", checks.integer),
        field("image", checks.boolean),
        inputs_of(data.get("inputs")),
    )
    targets = stored_of(data.get("targets"), "'targets'")
    if targets.ragged or targets.mean:
        raise ValueError("'targets' are ragged or normalised, expected neither")
    if image and (isinstance(inputs, dict) or (inputs.dtype, len(inputs.shape), inputs.ragged) != ("uint8", 3, False)):
        raise ValueError(f"'inputs' are {checks.short(data.get('inputs'))}, expected uint8 images")
    sizes = np.array(field("sizes", checks.items, checks.integer, (clients,), 1), np.int64)
    texts = {name: field(name, checks.text) for name in ("task", "loss", "normalise")}
    if texts["normalise"] not in NORMALISE or not all(re.fullmatch(r"[\w.-]{0,64}", text) for text in texts.values()):
        raise ValueError(f"'task', 'loss' and 'normalise' are {checks.short([*texts.values()])}, expected names")
    counts = np.empty((clients, 0), np.int64)
    if (texts["task"] == "classification" and not targets.shape) != ("counts" in data):
        raise ValueError("'counts' are missing, or there although rows have no classes")
    if "counts" in data:
        counts = _counts(data["counts"], clients, classes)
        if not np.array_equal(counts.sum(axis=1), sizes):
            raise ValueError("'counts' do not add up to 'sizes'")
    edges = field("edges", checks.items, checks.real, checks.ANY)
    if any(after <= before for before, after in pairwise(edges)):
        raise ValueError(f"'edges' are {checks.short(edges)}, expected each more than the one before")
    about = _per_channel(data, inputs.shape) if image and isinstance(inputs, Stored) else _no_channels(data)
    return {
        **about,
        **texts,
        "classes": classes,
        "class_names": tuple(field("class_names", checks.items, checks.text, (0, classes))),
        "sizes": sizes,
        "counts": counts,
        "inputs": inputs,
        "targets": targets,
        "test_sizes": np.array(field("test_sizes", checks.items, checks.integer, (clients,)), np.int64),
        "image": image,
        "feature_names": tuple(field("feature_names", checks.items, checks.text, checks.ANY)),
        "edges": tuple(edges),
        "reading": _reading(data.get("reading")),
        "contents": contents_digest(data),
    }


def _no_channels(data: dict[str, Any]) -> dict[str, Any]:
    for name in ("mean", "std"):
        checks.items(data.get(name), f"'{name}'", checks.number, (0,))
    return {"image_shape": (0, 0, 0), "mean": (), "std": ()}


def contents_digest(manifest: Mapping[str, Any]) -> str:
    """Identifies what a manifest of format 2 says of its arrays, as JSON has it."""
    said = {name: manifest.get(name) for name in CONTENTS}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def inputs_of(value: object) -> Stored | dict[str, Stored]:
    arrays = checks.mapping(value, "'inputs'")
    if isinstance(arrays.get("dtype"), str):
        return stored_of(arrays, "'inputs'")
    for name in arrays:
        if not is_name(name):
            raise ValueError(f"an array of 'inputs' is called {checks.short(name)}, expected the name of a keyword")
    if not arrays:
        raise ValueError("'inputs' are {}, expected arrays")
    return {name: stored_of(array, f"'inputs' {name}") for name, array in arrays.items()}


def is_name(name: str) -> bool:
    """Whether an array may be called so: as a keyword of ``forward``."""
    return len(name) <= 64 and name.isascii() and name.isidentifier()


def stored_of(value: object, what: str) -> Stored:
    array = checks.mapping(value, what)
    if (dtype := array.get("dtype")) not in DTYPES:
        raise ValueError(f"the 'dtype' of {what} is {checks.short(dtype)}, expected one of {', '.join(DTYPES)}")
    shape = checks.items(array.get("shape"), f"the 'shape' of {what}", checks.integer, checks.ANY, 1)
    if len(shape) > MOST_DIMENSIONS or math.prod(shape) > checks.MANY:
        raise ValueError(f"the 'shape' of {what} is {checks.short(shape)}, expected up to {MOST_DIMENSIONS} numbers")
    ragged = checks.boolean(array.get("ragged", False), f"'ragged' of {what}")
    if ragged and not shape:
        raise ValueError(f"the 'shape' of {what} is [], expected the length of the longest row")
    # One for all, or one per column.
    lengths = (1, shape[0]) if len(shape) == 1 and not ragged else (1,)
    mean, std = (
        checks.items(array[name], f"the '{name}' of {what}", checks.real, lengths) if name in array else []
        for name in ("mean", "std")
    )
    if len(mean) != len(std) or min(std, default=1) <= 0:
        raise ValueError(f"the 'std' of {what} is {checks.short(std)}, expected as many as 'mean', more than 0")
    values = checks.integer(array.get("values", 0), f"the 'values' of {what}", 0, MOST_VALUES)
    return Stored(dtype, tuple(shape), ragged, tuple(mean), tuple(std), values)


def _reading(value: object) -> dict[str, Any]:
    options = checks.mapping(value, "'reading'")
    for name, option in options.items():
        kind = READING.get(name, type(None))
        if isinstance(option, bool) or not isinstance(option, kind):
            raise ValueError(
                f"'reading' has {checks.short(name)}: {checks.short(option)}, expected options of data_prep"
            )
        if kind is list:
            checks.items(option, f"'{name}'", checks.text, checks.ANY)
    return options


def _sets(data: dict[str, Any], validation: bool, test_sizes: np.ndarray) -> list[str]:
    """The files that belong to no client; without a test file, clients have their own tests."""
    absent = data["format"] != 1 and test_sizes.any() and TEST_FILE not in checks.mapping(data.get("files"), "'files'")
    return [TEST_FILE] * (not absent) + [VALIDATION_FILE] * validation


def _row_bytes(about: dict[str, Any]) -> int:
    inputs = about["inputs"]
    arrays = inputs.values() if isinstance(inputs, dict) else [inputs]
    return sum(array.row_bytes for array in (*arrays, about["targets"]))


def _counts(value: object, clients: int, classes: int) -> np.ndarray:
    """Images per client and class."""
    rows = checks.items(value, "'counts'", checks.sequence, (clients,), classes)
    counts = np.array(rows)
    if counts.shape != (clients, classes) or counts.dtype.kind != "i" or counts.min() < 0 or counts.max() > checks.MANY:
        raise ValueError(f"'counts' are not {clients} rows of {classes} numbers of examples")
    return counts.astype(np.int64)


def _files(
    value: object, silo_names: list[str], sets: list[str], about: dict[str, Any], version: int
) -> dict[str, dict[str, Any]]:
    """The entries of exactly these files."""
    files, expected = checks.mapping(value, "'files'"), [*silo_names, *sets]
    if set(files) != set(expected):
        odd = sorted(set(files).symmetric_difference(expected))[0]
        others = "".join(f" and {name}" for name in sets)
        raise ValueError(f"'files' are not {silo_names[0]} to {silo_names[-1]}{others}: {checks.short(odd)}")
    kind, row_bytes = "images" if version == 1 else "rows", _row_bytes(about)
    for name, entry in files.items():
        entry = checks.mapping(entry, name)
        checks.checksum(entry.get("sha256"), f"the 'sha256' of {name}")
        rows = checks.integer(entry.get(kind), f"the '{kind}' of {name}", 1)
        # Memory is taken for this many rows, so the file must be large enough to have them.
        checks.integer(entry.get("bytes"), f"the 'bytes' of {name}", rows * row_bytes)
        if name in silo_names:
            checks.items(entry.get("client_ids"), f"the 'client_ids' of {name}", checks.integer, ())
    return files


def _rule(value: object) -> dict[str, Any]:
    rule = checks.mapping(value, "'partition'")
    if rule.get("kind") not in KINDS:
        raise ValueError(
            f"the partition's 'kind' is {checks.short(rule.get('kind'))}, expected one of {', '.join(KINDS)}"
        )
    if rule.get("exhausted") not in (None, "refill", "exact"):
        raise ValueError(f"the partition's 'exhausted' is {checks.short(rule['exhausted'])}, expected refill or exact")
    for name, check in (
        ("dirichlet", checks.number),
        ("size_sigma", checks.number),
        ("classes_per_client", checks.integer),
    ):
        if rule.get(name) is not None:
            check(rule[name], f"the partition's {name!r}")
    return rule
