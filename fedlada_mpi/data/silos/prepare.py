"""Preparation of a silo's own data, where it is: nobody else reads it, or sees how much there is of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...support.errors import UserError, shortened
from ...support.inputs import read_bytes, reason
from .. import sources
from ..normalise import by_client
from ..prepare import bytes_on_disk, complete, describe, divided, fingerprint, strata_of
from ..rows import as_floats, has_floats, named, take_rows, values_of
from ..settings import OWN, PrepareSettings
from ..sources import ArraySet
from ..sources.imagefolder import roots
from ..write import Division, attributes_of, publish, staging, write_all, write_manifest
from .agreement import MOST_CLIENTS
from .files import (
    MOST_CLASSES,
    PRIVATE,
    PUBLIC,
    Public,
    SiloManifest,
    by_list,
    check_name,
    read_private,
    sums_record,
    write_public,
)
from .sums import Sums

TEST_SHARE = 0.2


def read_classes(path: Path) -> list[str]:
    """The class list: a name on each line."""
    try:
        lines = read_bytes(path).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"--classes: {path} cannot be read ({reason(error)})") from None
    except UnicodeDecodeError:
        raise UserError(f"--classes: {path} is not text in UTF-8, expected the name of a class on each line") from None
    names = [line.strip() for line in lines if line.strip()]
    if twice := next((name for name in names if names.count(name) > 1), None) if len(names) <= MOST_CLASSES else "":
        raise UserError(f"--classes: {path} has {shortened(twice)} twice, expected another name on each line")
    if not 2 <= len(names) <= MOST_CLASSES:
        raise UserError(f"--classes: {path} has {len(names)} names, expected 2 to {MOST_CLASSES}, one on each line")
    return names


def prepare_silo(
    settings: PrepareSettings,
    name: str,
    classes: Sequence[str] = (),
    edges: Sequence[float] = (),
    report: Callable[[str], None] = lambda message: None,
) -> SiloManifest:
    """Write the silo's files; ``classes``: the list that all silos have, ``edges``: the ends of their bins of time."""
    check_name(name, "--silo")
    settings = _checked(settings)
    if not settings.force and (settings.out / PRIVATE).exists():
        present = read_private(settings.out)
        raw = settings.raw
        same = raw is None or (
            present.silo == name
            and (not by_list(present.task) or [*present.class_names] == [*classes])
            and fingerprint(settings, raw, present.source) == present.source
            and present.reading == settings.recorded
            and (present.seed, present.resize) == (settings.seed, settings.resize)
        )
        if same and complete(present):
            report(f"{settings.out}: already prepared, nothing to do (--force prepares again)")
            return present
        raise UserError(
            f"{settings.out} holds the silo {present.silo}, prepared otherwise or damaged: add --force to replace it, "
            "or choose another --out"
        )
    raw = sources.find_raw(settings.dataset, settings.raw, settings.out.parent, False)
    if settings.dataset == "imagefolder" and settings.test_share is None and roots(raw)[1] is None:
        settings = replace(settings, test_share=TEST_SHARE)
    report(f"reading {settings.dataset} from {raw}")
    examples = sources.load_listed(settings.dataset, raw, settings.workers, classes, **settings.reading)
    settings = _decided(settings, examples)
    examples = replace(examples, test_owners=None)  # its test rows are the silo's
    division = divided(settings, examples, strata_of(examples, settings.strata))
    if len(division.owned) > MOST_CLIENTS:
        raise UserError(f"--silo: got {len(division.owned)} clients, expected at most {MOST_CLIENTS} in a silo")
    if settings.normalise not in ("", "none") and not has_floats(examples.inputs):
        if examples.image or examples.task == "next-token":
            raise UserError("--normalise has no effect on images and tokens: leave it out")
        inputs, tests = as_floats(examples.inputs), as_floats(examples.test_inputs)
        examples = replace(examples, inputs=inputs, test_inputs=tests)
    if settings.normalised == "client":
        examples, division = by_client(examples, division)
    manifest = _described(settings, name, raw, examples, division, edges)
    number, clients = sum(map(len, division.owned)), len(division.owned)
    report(f"writing {number} training rows of {clients} clients and {len(examples.test_targets)} test rows")
    with _for_the_owner_alone(settings.out), staging(settings.out, bytes_on_disk(examples, division)) as folder:
        silos = [np.arange(len(division.owned))]
        manifest["files"] = write_all(folder, examples, division, silos, attributes_of(manifest), SiloManifest.file)
        write_manifest(folder, manifest, PRIVATE)
        write_public(folder, _public(manifest))
        publish(folder, settings.out, [*manifest["files"], PUBLIC, PRIVATE])
    return read_private(settings.out)


def _checked(settings: PrepareSettings) -> PrepareSettings:
    if settings.dataset not in OWN:
        raise UserError(f"--silo: got --dataset {settings.dataset}, expected one of {', '.join(OWN)}")
    for option, given in (("silos", settings.silos is not None), ("validation", settings.validation > 0)):
        if given:
            raise UserError(f"--{option} has no effect on the data of one silo: leave it out")
    # Who has few classes shares them out at random, unless told otherwise.
    settings = replace(settings, silos=1)
    settings.check()
    return settings


def _decided(settings: PrepareSettings, examples: ArraySet) -> PrepareSettings:
    """One client, or those that own rows, or as many as are asked for."""
    if settings.partition:
        return settings
    if examples.owners is not None and settings.clients is None:
        return replace(settings, partition="natural")
    return replace(settings, partition="iid", clients=settings.clients or 1)


def _described(
    settings: PrepareSettings,
    name: str,
    raw: Path,
    examples: ArraySet,
    division: Division,
    edges: Sequence[float],
) -> dict[str, Any]:
    """What private.json says, without its files."""
    if (examples.task == "survival") != bool(edges):
        raise UserError(
            "--edges has no effect without --task survival: leave it out"
            if edges
            else "--task survival: got no --edges, expected the ends of the bins of time, which all silos share"
        )
    if any(after <= before for before, after in pairwise(edges)):
        raise UserError(f"--edges: got {list(edges)}, expected each more than the one before")
    # The mean of all silos is not known here.
    manifest = describe(replace(settings, normalise="none"), fingerprint(settings, raw), examples, division)
    pooled = settings.normalised == "pooled" and has_floats(examples.inputs)
    manifest["normalise"] = settings.normalised if has_floats(examples.inputs) else "none"
    manifest["edges"] = [float(np.float32(edge)) for edge in edges]
    sums = {
        array_name: Sums.of(take_rows(array, division.kept), f"--normalise pooled: inputs {array_name}".strip())
        for array_name, array in named(examples.inputs).items()
        if examples.image or (pooled and values_of(array).dtype.kind == "f")
    }
    return {"silo": name, **manifest, "sums": sums_record(sums)}


def _public(manifest: dict[str, Any]) -> Public:
    """The part of a described silo that others see."""
    fields = [name for name in Public.__dataclass_fields__ if name != "name"]
    return Public.parsed({"format": 1, "name": manifest["silo"], **{name: manifest[name] for name in fields}})


@contextmanager
def _for_the_owner_alone(out: Path) -> Iterator[None]:
    """What is written in the block can be read by this account alone; so can a new directory."""
    around = [path for path in out.absolute().parents if not path.exists()]
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
        for path in around:  # which other silos may use, too
            if path.is_dir():
                path.chmod(0o777 & ~before)
