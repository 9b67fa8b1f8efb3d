"""What silos agree on before a run: from what each makes public, the same on every rank.

found = joined([public_of_a, public_of_b])          # or a UserError that names two silos and what differs
manifest = shared_manifest(found, clients=[1, 3])   # of all, without counts, files and sizes
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...support.errors import UserError, shortened
from ..manifest import Manifest, Stored
from .files import Public, SiloManifest

SHIFT = 20  # bits of a client's number within its silo
MOST_CLIENTS = 1 << SHIFT  # of a silo
# What silos must have in common, and what to do about it.
ALIKE = {
    "class_names": ("class list", "give all silos the same --classes FILE"),
    "task": ("task", "give all silos the same --task"),
    "loss": ("loss", "give all silos the same --loss"),
    "image": ("kind of data", "prepare images in all silos, or in none"),
    "feature_names": ("columns", "give all silos tables with the same columns; text becomes a column for each value"),
    "normalise": ("normalisation", "give all silos the same --normalise"),
    "edges": ("bins of time", "give all silos the same --edges"),
    "dataset": ("kind of source", "give all silos the same --dataset"),
}


def joined(publics: Sequence[Public]) -> Public:
    """What the silos have in common; where one differs from the first, a ``UserError``."""
    first, *others = publics
    names = [public.name for public in publics]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two silos are called {twice}: expected another name for each, by data_prep --silo NAME")
    for other in others:
        for field, (what, cure) in ALIKE.items():
            one, two = getattr(first, field), getattr(other, field)
            if one != two:
                raise UserError(_different(what, first.name, one, other.name, two, cure))
        _refuse_other_shapes(first, other)
    arrays = {name: _widest([public.arrays[name] for public in publics]) for name in first.arrays}
    classes = max(public.classes for public in publics)
    inputs, targets = arrays if isinstance(first.inputs, dict) else arrays[""], first.targets
    if first.task == "next-token":
        targets = replace(targets, dtype=np.result_type(*(public.targets.dtype for public in publics)).name)
    return replace(first, name="", classes=classes, inputs=inputs, targets=targets)


def _different(what: str, one: str, has: object, other: str, got: object, cure: str) -> str:
    values = shortened(_plain(has), 60), shortened(_plain(got), 60)
    if values[0] == values[1]:  # the difference is beyond what fits
        return f"silos {one} and {other} have another {what}: {cure}"
    return f"silo {one} has the {what} {values[0]}, and silo {other} {values[1]}: {cure}"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _refuse_other_shapes(first: Public, other: Public) -> None:
    if first.classes != other.classes and first.task != "next-token":
        cure = ALIKE["class_names"][1]
        raise UserError(_different("number of classes", first.name, first.classes, other.name, other.classes, cure))
    if [*first.arrays] != [*other.arrays] or isinstance(first.inputs, dict) != isinstance(other.inputs, dict):
        cure = "prepare the same arrays in all silos"
        raise UserError(_different("inputs", first.name, [*first.arrays], other.name, [*other.arrays], cure))
    pairs = {f"inputs{f' {name}' * bool(name)}": (first.arrays[name], other.arrays[name]) for name in first.arrays}
    if first.task != "next-token":  # whose targets are the inputs again, in a type for the silo's largest token
        pairs["targets"] = first.targets, other.targets
    for name, (one, two) in pairs.items():
        if _row(one) != _row(two):
            cure = "prepare rows of one type and shape in all silos (images: the same --resize)"
            raise UserError(_different(name, first.name, _row(one), other.name, _row(two), cure))


def _row(stored: Stored) -> str:
    """The type and shape of a row; rows of any length may differ in the longest one."""
    shape = list(stored.shape[1:] if stored.ragged else stored.shape)
    return f"{stored.dtype} {shape}{' of any length' * stored.ragged}"


def _widest(several: Sequence[Stored]) -> Stored:
    """For the longest rows and the largest integers of all."""
    values = 0 if any(not stored.values for stored in several) else max(stored.values for stored in several)
    first = several[0]
    shape = (max(s.shape[0] for s in several), *first.shape[1:]) if first.ragged else first.shape
    return replace(first, shape=shape, values=values)


Statistics = Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]


def with_statistics(manifest: Manifest, statistics: Statistics) -> Manifest:
    """Normalised by the mean and the deviation that all silos have agreed on."""
    if manifest.image:
        mean, std = statistics[""]
        return replace(manifest, mean=mean, std=std)
    arrays = dict(manifest.arrays)
    for name, (mean, std) in statistics.items():
        arrays[name] = replace(arrays[name], mean=mean, std=std)
    return replace(manifest, inputs=arrays if isinstance(manifest.inputs, dict) else arrays[""])


def as_agreed(own: SiloManifest, common: Public) -> Manifest:
    """A silo's own manifest, for models of what all silos have."""
    return replace(own, inputs=common.inputs, classes=common.classes)


def shared_manifest(common: Public, clients: Sequence[int]) -> Manifest:
    """What every rank knows of the data of all silos, whose numbers of clients these are: no counts, files, sizes.

    Clients are numbered silo by silo, in the order of the silos' names.
    """
    m, ends = sum(clients), np.cumsum(clients)
    shape = common.arrays[""].shape if common.image else (0, 0, 0)
    channels = (0.0,) * shape[2], (1.0,) * shape[2]
    contents = digest([common.record(), list(clients)])
    return Manifest(
        root=Path(),
        dataset=common.dataset,
        classes=common.classes,
        class_names=common.class_names,
        mean=channels[0],
        std=channels[1],
        image_shape=(shape[0], shape[1], shape[2]),
        clients=m,
        silos=len(clients),
        sizes=np.zeros(m, np.int64),
        counts=np.empty((m, 0), np.int64),
        client_ids=tuple(np.split(np.arange(m), ends[:-1])),
        client_names=(),
        partition={"kind": "natural"},
        seed=0,
        source="silos",
        files={},
        client_sha256=(contents,),
        validation=0.0,
        resize=0,
        test_share=0.0,
        format=2,
        inputs=common.inputs,
        targets=common.targets,
        test_sizes=np.zeros(m, np.int64),
        image=common.image,
        task=common.task,
        loss=common.loss,
        feature_names=common.feature_names,
        normalise=common.normalise,
        edges=common.edges,
        contents=contents,
    )


def digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def numbers_of(index: int, clients: int) -> np.ndarray:
    """The numbers of a silo's clients for all that is drawn: they do not depend on what other silos have."""
    return (index << SHIFT) + np.arange(clients, dtype=np.int64)
