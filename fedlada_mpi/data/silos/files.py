"""The files of a silo, in a directory that is its own.

silo.h5        the training rows of its clients
test.h5        its test rows
private.json   counts, checksums, owners and sums: read by the silo alone
public.json    its name, classes, and types and shapes of a row: what other silos and the server get to see
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...support.errors import UserError
from ...support.inputs import parse_json, read_bytes, reason
from .. import json_checks as checks
from ..manifest import NORMALISE, Manifest, Stored, inputs_of, parsed, prepare_command, stored_of
from .sums import Sums

SILO_FILE, PRIVATE, PUBLIC = "silo.h5", "private.json", "public.json"
VERSION = 1  # of public.json
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MOST_CLASSES = 100_000
MOST_BYTES = 1 << 22  # of public.json
LARGEST_SUM, LARGEST_SQUARES = 1 << 254, 1 << 468  # in units, which the words of sums hold for 2^18 silos


T = TypeVar("T")


def check_name(name: object, what: str) -> str:
    """A silo's name, which is part of paths; ``what`` gave it."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(
            f"{what}: got {checks.short(name)}, expected up to 64 letters, digits, dots, dashes and underscores"
        )
    return name


@dataclass(frozen=True, eq=False)
class SiloManifest(Manifest):
    """What a silo knows of its own data."""

    silo: str = ""
    sums: Mapping[str, Sums] = field(default_factory=dict)  # of arrays that are normalised by all silos' rows

    @staticmethod
    def file(silo: int) -> str:
        return SILO_FILE

    @property
    def command(self) -> str:
        options: dict[str, Any] = {"silo": self.silo, **({"classes": "FILE"} if self.labelled_by_list else {})}
        options |= {"clients": self.clients} if self.partition.get("kind") != "natural" else {}
        options |= {"seed": self.seed, "resize": self.resize, "test_share": self.test_share, **self.reading}
        return prepare_command(self.dataset, self.root, options) + " --force"

    @property
    def labelled_by_list(self) -> bool:
        return by_list(self.task)


def by_list(task: str) -> bool:
    """Whether the classes of a task are those of a list that all silos have."""
    return task in ("classification", "segmentation")


@dataclass(frozen=True)
class Public:
    """What a silo makes public; nothing in it is counted."""

    name: str
    dataset: str
    task: str
    loss: str
    classes: int
    class_names: tuple[str, ...]
    image: bool
    inputs: Stored | dict[str, Stored]
    targets: Stored
    normalise: str
    feature_names: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()

    @property
    def arrays(self) -> dict[str, Stored]:
        return self.inputs if isinstance(self.inputs, dict) else {"": self.inputs}

    @classmethod
    def of(cls, m: SiloManifest) -> Public:
        about = (m.task, m.loss, m.classes, m.class_names, m.image, m.inputs, m.targets, m.normalise)
        return cls(m.silo, m.dataset, *about, m.feature_names, m.edges)

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        inputs = {name: _record(stored) for name, stored in self.arrays.items()}
        return {
            "format": VERSION,
            "name": self.name,
            "dataset": self.dataset,
            "task": self.task,
            "loss": self.loss,
            "classes": self.classes,
            "class_names": list(self.class_names),
            "image": self.image,
            "inputs": inputs if isinstance(self.inputs, dict) else inputs[""],
            "targets": _record(self.targets),
            "normalise": self.normalise,
            "feature_names": list(self.feature_names),
            "edges": list(self.edges),
        }

    @classmethod
    def parsed(cls, value: object) -> Public:
        """From what a silo says of itself; raises ValueError."""
        data = checks.mapping(value, "it")
        if data.get("format") != VERSION or isinstance(data.get("format"), bool):
            raise ValueError(f"'format' is {checks.short(data.get('format'))}, expected {VERSION}")
        known = {"format", *cls.__dataclass_fields__}
        if odd := sorted({str(name) for name in data} - known):
            raise ValueError(f"it has {checks.short(odd[0])}, expected {', '.join(sorted(known))} alone")
        texts = {name: checks.text(data.get(name), f"'{name}'") for name in ("dataset", "task", "loss", "normalise")}
        if texts["normalise"] not in NORMALISE or not all(re.fullmatch(r"[\w.-]{0,64}", t) for t in texts.values()):
            raise ValueError(f"'dataset', 'task', 'loss' and 'normalise' are {checks.short([*texts.values()])}")
        if not NAME.fullmatch(name := checks.text(data.get("name"), "'name'")):
            raise ValueError(f"'name' is {checks.short(name)}, expected letters, digits, dots, dashes and underscores")
        classes = checks.integer(data.get("classes"), "'classes'", 0, 1 << 31)
        names = checks.items(data.get("class_names"), "'class_names'", checks.text, checks.ANY)
        if len(names) not in (0, classes) or len(names) > MOST_CLASSES:
            raise ValueError(f"'class_names' are {len(names)}, expected one for each of {classes} classes")
        image, inputs = checks.boolean(data.get("image"), "'image'"), inputs_of(data.get("inputs"))
        if image and (isinstance(inputs, dict) or (inputs.dtype, len(inputs.shape)) != ("uint8", 3)):
            raise ValueError("'inputs' are no images, but 'image' is true")
        targets = stored_of(data.get("targets"), "'targets'")
        arrays = [*(inputs.values() if isinstance(inputs, dict) else [inputs]), targets]
        if any(stored.mean or stored.std for stored in arrays):
            raise ValueError("an array has a 'mean', which silos agree on later")
        edges = checks.items(data.get("edges"), "'edges'", checks.real, checks.ANY)
        features = checks.items(data.get("feature_names"), "'feature_names'", checks.text, checks.ANY)
        return cls(
            name=name,
            **texts,
            classes=classes,
            class_names=tuple(names),
            image=image,
            inputs=inputs,
            targets=targets,
            feature_names=tuple(features),
            edges=tuple(edges),
        )


def _record(stored: Stored) -> dict[str, Any]:
    more: dict[str, Any] = {"ragged": True} if stored.ragged else {}
    more |= {"values": stored.values} if stored.values else {}
    return {"dtype": stored.dtype, "shape": list(stored.shape), **more}


def read_public(directory: Path) -> Public:
    return _read(directory / PUBLIC, lambda content: Public.parsed(parse_json(content)))


def read_private(directory: Path) -> SiloManifest:
    """The manifest of this silo's own data; every field is checked, and public.json must say the same."""

    def manifest_of(content: bytes) -> SiloManifest:
        data = checks.mapping(parse_json(content), "it")
        if data.get("format") != 2:
            raise ValueError(f"'format' is {checks.short(data.get('format'))}, expected 2")
        return parsed(data, directory, SiloManifest, silo=_name(data.get("silo")), sums=_sums(data.get("sums")))

    path, public = directory / PRIVATE, read_public(directory)
    manifest = _read(path, manifest_of)
    if manifest.silos != 1:
        raise UserError(f"{path}: got {manifest.silos} silos, expected one: {_prepare(directory)}")
    if {*manifest.sums} != ({*normalised(public)}) or any(
        len(sums.x) != width for sums, width in zip(manifest.sums.values(), normalised(public).values(), strict=True)
    ):
        raise UserError(f"{path}: 'sums' are not those of its arrays: {_prepare(directory)}")
    if Public.of(manifest) != public:
        raise UserError(f"{directory / PUBLIC}: says something else than {PRIVATE}: {_prepare(directory)}")
    return manifest


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    try:
        content = read_bytes(path)
        if path.name == PUBLIC and len(content) > MOST_BYTES:
            raise ValueError(f"it has {len(content)} bytes, expected at most {MOST_BYTES}")
        return parse(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}): {_prepare(path.parent)}") from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise UserError(f"{path}: not what data_prep has written ({error}): {_prepare(path.parent)}") from None


def normalised(public: Public) -> dict[str, int]:
    """The arrays that are normalised by the rows of all silos, and how many means each has."""
    if public.image:
        return {"": public.arrays[""].shape[2]}
    if public.normalise != "pooled":
        return {}
    floats = {name: stored for name, stored in public.arrays.items() if stored.dtype.startswith("float")}
    return {n: s.shape[0] if len(s.shape) == 1 and not s.ragged else 1 for n, s in floats.items()}


def write_public(folder: Path, public: Public) -> None:
    (folder / PUBLIC).write_text(json.dumps(public.record(), indent=2) + "\n")


def sums_record(sums: Mapping[str, Sums]) -> dict[str, Any]:
    return {name: {"n": each.count, "x": list(each.x), "squares": list(each.squares)} for name, each in sums.items()}


def _name(value: object) -> str:
    name = checks.text(value, "'silo'")
    if not NAME.fullmatch(name):
        raise ValueError(f"'silo' is {checks.short(name)}, expected a name")
    return name


def _sums(value: object) -> dict[str, Sums]:
    found = {}
    for name, each in checks.mapping(value, "'sums'").items():
        entry = checks.mapping(each, f"'sums' {checks.short(name)}")
        count = checks.integer(entry.get("n"), "'n' of 'sums'")
        limits = {"x": (-LARGEST_SUM, LARGEST_SUM), "squares": (0, LARGEST_SQUARES)}
        x, squares = (
            checks.items(entry.get(part), f"'{part}' of 'sums'", checks.integer, checks.ANY, *between)
            for part, between in limits.items()
        )
        if len(x) != len(squares):
            raise ValueError(f"'squares' of 'sums' are {len(squares)}, expected {len(x)}, as 'x'")
        found[name] = Sums(count, tuple(x), tuple(squares))
    return found


def _prepare(directory: Path) -> str:
    return f"prepare the silo's data with python -m data_prep --silo NAME --out {directory}"
