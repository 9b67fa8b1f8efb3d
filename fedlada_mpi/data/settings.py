"""Settings of a preparation, checked before anything is read or written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..settings import MOST, PRESETS, SETTINGS, SHIPPED, TASKS, check_value
from ..support.errors import UserError
from ..support.suggestions import did_you_mean
from .manifest import NORMALISE, POOLED, READING, data_root
from .partition import Rule
from .sources import LOADERS
from .sources.text import LENGTH

DEFAULT_CLIENTS = 100
DEFAULT_SILOS = 10
OWN = ("imagefolder", "npz", "csv", "text")  # data sets of the user, whose name is that of the raw data
OWNED = (*OWN, *SHIPPED[1:])  # which may have owners
FEW = ("imagefolder", "csv", "text")  # which may be small
# The options of each data set's loader.
OPTIONS = {
    "imagefolder": ("resize", "test_share"),
    "csv": ("target", "client", "drop", "test_share", "task"),
    "text": ("length",),
    "npz": ("task",),
}
NORMALISED = ("csv", "npz", *SHIPPED[1:])  # which may be arrays of floats
LARGEST = 1024  # pixels of a side that images may be resized to
# Settings of a preparation that runs have, too, with the same range.
OF_RUNS = {
    name: name for name in ("clients", "partition", "dirichlet", "exhausted", "classes_per_client", "size_sigma")
}
OF_RUNS |= {"validation": "validation", "seed": "partition_seed"}
IMAGES_PER_CLIENT = 20  # of a small folder of images or a small table, which gets fewer clients
STRATA = 10


@dataclass(frozen=True)
class PrepareSettings:
    """What to prepare, and where to write it.

    ``out`` None means a folder of the data root with the name of the data set, or of ``raw`` where that is
    the user's own; ``clients`` None the paper's number (``natural``: the data's own; ``imagefolder``: fewer, where
    there are few images); ``silos`` None ten, or as many as there are clients; ``dirichlet`` None the preset of the
    data set; ``partition`` "" ``natural`` where the user's data has owners, ``dirichlet`` otherwise and where one of
    its settings is given; ``raw`` None the data under ``out/..`` (see ``raw_available``) or a download; ``workers`` 0
    all cores this process may use. ``resize`` and ``test_share`` are those of ``load_imagefolder``, ``target``,
    ``client``, ``drop``, ``test_share`` and ``task`` those of ``load_csv``, ``length`` that of ``load_text``.
    ``normalise`` "" means pooled for a table and what ships with the package, otherwise none; ``strata``: quantile bins
    of a number by which rows are dealt where they have no classes.
    """

    dataset: str
    out: Path = None  # type: ignore[assignment]
    raw: Path | None = None
    clients: int | None = None
    silos: int | None = None
    partition: str = ""
    dirichlet: float | None = None
    exhausted: str = "refill"
    classes_per_client: int = 2
    size_sigma: float = 0.0
    seed: int = 20
    validation: float = 0.0
    workers: int = 0
    force: bool = False
    download: bool = True
    resize: int = 0
    test_share: float | None = None
    target: Sequence[str] = ()
    client: str = ""
    drop: Sequence[str] = ()
    task: str = ""
    length: int = 0
    normalise: str = ""
    strata: int = STRATA

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw", Path(self.raw) if self.raw is not None else None)
        object.__setattr__(self, "out", Path(self._default_out if self.out is None else self.out))
        dealt = self.dirichlet is not None or self.size_sigma or self.exhausted != PrepareSettings.exhausted
        if not self.partition and (dealt or self.dataset not in OWNED):
            object.__setattr__(self, "partition", "dirichlet")

    def decided(self, owners: bool, stratified: bool = True) -> PrepareSettings:
        """With a partition, for data that has owners or has none, and classes or numbers to divide it by or not."""
        dealt = "dirichlet" if stratified else "iid"
        return self if self.partition else replace(self, partition="natural" if owners else dealt)

    @property
    def _default_out(self) -> Path:
        own = self.dataset in OWN and self.raw is not None
        # Absolute: "." and "photos/.." have a name, too.
        raw = Path(os.path.abspath(self.raw)) if self.raw is not None and own else Path(self.dataset)
        return data_root() / (raw.stem if raw.suffix in (".npz", ".csv") else raw.name)

    @property
    def reading(self) -> dict[str, Any]:
        """Options of the loader."""
        given = {name: getattr(self, name) for name in OPTIONS.get(self.dataset, ())}
        return given | ({"length": self.length or LENGTH} if "length" in given else {})

    @property
    def recorded(self) -> dict[str, Any]:
        """Options that are not usual, as a manifest has them."""
        options = {**self.reading, "strata": self.strata if self.strata != STRATA else None}
        values = {
            name: list(v) if isinstance(v, (list, tuple)) else v for name, v in options.items() if name in READING
        }
        return {name: value for name, value in values.items() if value}

    @property
    def normalised(self) -> str:
        return self.normalise or ("pooled" if self.dataset in POOLED else "none")

    @property
    def rule(self) -> Rule:
        preset = PRESETS.get(self.dataset, {}).get("dirichlet", 0.6)
        dealt = self.partition in ("dirichlet", "pathological")
        return Rule(
            kind=self.partition,
            dirichlet=(preset if self.dirichlet is None else float(self.dirichlet))
            if self.partition == "dirichlet"
            else None,
            exhausted=self.exhausted if dealt else None,
            classes_per_client=self.classes_per_client if self.partition == "pathological" else None,
            size_sigma=float(self.size_sigma) if self.partition != "natural" else None,
        )

    @property
    def wanted_clients(self) -> int | None:
        """The number of clients to make; None where the data determines it."""
        if self.clients is None and self.partition not in ("natural", "") and self.dataset not in FEW:
            return PRESETS.get(self.dataset, {}).get("clients", DEFAULT_CLIENTS)
        return self.clients

    def clients_for(self, images: int) -> int:
        """The number of clients to make of so many training images."""
        return self.wanted_clients or min(DEFAULT_CLIENTS, max(1, images // IMAGES_PER_CLIENT))

    def silos_for(self, clients: int) -> int:
        return min(DEFAULT_SILOS, clients) if self.silos is None else self.silos

    def check(self) -> None:
        if self.dataset not in LOADERS:
            known = f"one of {', '.join(LOADERS)}{did_you_mean(self.dataset, LOADERS)}"
            raise UserError(f"--dataset: got {self.dataset!r}, expected {known}")
        for name, setting in OF_RUNS.items():
            if (value := getattr(self, name)) not in (None, ""):
                check_value(SETTINGS[setting], value, name)
        if self.dataset in SHIPPED and self.raw is not None:
            name = "the digits" if self.dataset == "digits" else self.dataset
            raise UserError(f"--raw has no effect on {name}, which ship with the package: leave it out")
        self._check_options()
        if (
            self.dataset == "imagefolder"
            and self.raw is not None
            and self.raw.resolve() in (self.out.resolve(), *self.out.resolve().parents)
        ):
            raise UserError(
                f"--out: got {self.out}, in the folder of the images, expected another: --out {self.out}-shards"
                if self.raw.resolve() == self.out.resolve()
                else f"--out: got {self.out}, which is in the folder of the images, expected another"
            )
        if not 0 <= self.resize <= LARGEST:
            raise UserError(f"--resize: got {self.resize}, expected 1 to {LARGEST} pixels, such as 32")
        if self.test_share is not None and not 0 < self.test_share < 1:
            raise UserError(f"--test-share: got {self.test_share}, expected a share of the rows, such as 0.1")
        if self.task and self.task not in TASKS:
            raise UserError(
                f"--task: got {self.task!r}, expected one of {', '.join(TASKS)}{did_you_mean(self.task, TASKS)}"
            )
        if self.normalise and self.normalise not in NORMALISE:
            raise UserError(f"--normalise: got {self.normalise!r}, expected one of {', '.join(NORMALISE)}")
        for name, value in (("length", self.length or 1), ("strata", self.strata)):
            if not 1 <= value <= MOST[int]:
                raise UserError(f"--{name}: got {value}, expected at least 1")
        if self.silos is not None and self.silos < 1:
            raise UserError(f"--silos: got {self.silos}, expected at least 1")
        if self.workers < 0:
            raise UserError(f"--workers: got {self.workers}, expected 0 (all cores) or more")
        if self.size_sigma and self.partition == "natural":
            raise UserError(
                "--size-sigma has no effect on --partition natural, whose sizes are the data's own: leave it out"
            )
        if self.wanted_clients is not None:
            check_silos(self.silos_for(self.wanted_clients), self.wanted_clients)

    def _check_options(self) -> None:
        """Refuse options that have no effect on this data set."""
        names = {name for options in OPTIONS.values() for name in options} - {*OPTIONS.get(self.dataset, ())}
        names |= set() if self.dataset in NORMALISED else {"normalise"}
        for name in sorted(names):
            if getattr(self, name):
                option = name.replace("_", "-")
                raise UserError(f"--{option} has no effect on --dataset {self.dataset}: leave it out")


def check_silos(silos: int, clients: int) -> None:
    if silos > clients:
        raise UserError(f"--silos: got {silos} silos for {clients} clients, expected at most {clients}")
