"""Preparation of shards: find the raw data, read it, assign it to clients, write it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..support.errors import UserError
from . import sources
from .manifest import MANIFEST, MOST_VALUES, RAW_PATH, READING, Manifest, as_text, read_manifest
from .normalise import by_client, statistics, time_edges
from .partition import hold_out, partition, strata
from .picture import PICTURE, draw
from .rows import Inputs, Ragged, Rows, as_floats, has_floats, length, longest, named, values_of
from .settings import PrepareSettings, check_silos
from .sources import ArraySet, ImageSet, table
from .sources.bounds import check_memory
from .sources.imagefolder import TEST_SHARE
from .sources.raw import is_readable
from .write import Division, attributes_of, client_checksums, publish, staging, write_all, write_manifest

Examples: TypeAlias = "ImageSet | ArraySet"
CELL_BYTES = 32  # in the table of images per client and class, as an array, a list and text


def prepare(
    settings: PrepareSettings, report: Callable[[str], None] = lambda message: None, like: str = ""
) -> Manifest:
    """Write the shards that ``settings`` describe, unless they are there; ``report`` receives progress messages.

    ``like``: the fingerprint of the raw data in other shards of it.
    """
    settings.check()
    if not settings.force and (settings.out / MANIFEST).exists():
        present = read_manifest(settings.out)
        refuse_other_settings(settings, present)
        if complete(present):
            report(f"{settings.out}: already prepared with these settings, nothing to do (--force prepares again)")
            return present
        report(f"{settings.out}: files are missing or truncated, preparing again")
    raw = sources.find_raw(settings.dataset, settings.raw, settings.out.parent, settings.download)
    report(f"reading {settings.dataset} from {raw}")
    examples = sources.load(settings.dataset, raw, settings.workers, **settings.reading)
    what = "images" if isinstance(examples, ImageSet) or examples.image else "rows"
    if not settings.partition and examples.owners is not None:
        report(f"the data has owners: each is a client (--partition dirichlet divides all {what} anew)")
    labels = strata_of(examples, settings.strata)
    settings = settings.decided(examples.owners is not None, labels is not None)
    if settings.partition != "natural":
        examples = simplest(replace(examples, test_owners=None))
    division = divided(settings, examples, labels)
    if settings.normalise not in ("", "none"):
        if not isinstance(examples, ArraySet) or examples.image or examples.task == "next-token":
            raise UserError("--normalise has no effect on images and tokens: leave it out")
        if not has_floats(examples.inputs):
            inputs, tests = as_floats(examples.inputs), as_floats(examples.test_inputs)
            examples = replace(examples, inputs=inputs, test_inputs=tests)
    if settings.normalised == "client" and isinstance(examples, ArraySet):
        examples, division = by_client(examples, division)
    manifest = describe(settings, fingerprint(settings, raw, like), examples, division)
    number, clients = sum(map(len, division.owned)), len(division.owned)
    report(f"writing {number} training {what} of {clients} clients to {manifest['silos']} silo files")
    return write_shards(settings.out, manifest, examples, division, settings.raw)


def write_shards(
    out: Path, manifest: dict[str, Any], examples: Examples, division: Division, raw: Path | None = None
) -> Manifest:
    """Write the shards of a described data set, with its picture.

    ``raw``, what the user gave, is noted for other partitions of the same data.
    """
    silos = np.array_split(np.arange(len(division.owned)), manifest["silos"])
    with staging(out, needed_bytes=bytes_on_disk(examples, division)) as folder:
        manifest["files"] = write_all(folder, examples, division, silos, attributes_of(manifest))
        write_manifest(folder, manifest)
        draw(read_manifest(folder), folder / PICTURE)
        if raw is not None:
            (folder / RAW_PATH).write_bytes(os.fsencode(os.path.abspath(raw)))
        publish(folder, out, [*manifest["files"], PICTURE, *([] if raw is None else [RAW_PATH]), MANIFEST])
    return read_manifest(out)


def simplest(examples: Examples) -> Examples:
    """As an ``ImageSet`` where that has all there is: uint8 images with one label, and test images of nobody."""
    if not isinstance(examples, ArraySet) or not (examples.image and examples.labelled):
        return examples
    if examples.test_owners is not None or examples.loss:
        return examples
    images, tests = examples.inputs, examples.test_inputs
    assert isinstance(images, np.ndarray)
    assert isinstance(tests, np.ndarray)
    if images.shape[3] not in (1, 3):
        return examples
    labels, names = (examples.targets, examples.test_targets), examples.class_names
    share = examples.test_share
    return ImageSet(images, labels[0], tests, labels[1], names, examples.owners, test_share=share)


def strata_of(examples: Examples, bins: int) -> np.ndarray | None:
    """What rows are divided and held out by: their classes, or quantile bins of a number; None where they have none."""
    targets = examples.targets
    if isinstance(examples, ImageSet) or examples.labelled:
        return targets
    if examples.task == "survival":
        return strata(targets[:, 1], bins)
    if targets.dtype.kind in "biuf" and targets[:1].size == 1 and examples.task != "next-token":
        return strata(targets.reshape(-1).astype(np.float64), bins)
    return None


def divided(settings: PrepareSettings, examples: Examples, labels: np.ndarray | None) -> Division:
    """Who has which rows."""
    rows = len(examples.targets)
    kept, held = hold_out(settings.validation, np.zeros(rows, int) if labels is None else labels, settings.seed)
    owned = divide(settings, examples, kept, labels)
    owners = examples.owners if settings.partition == "natural" else None
    names = [] if owners is None else [str(name) for name in np.unique(owners)]
    tested = None if examples.test_owners is None else tests_of(names, examples.test_owners)
    return Division(owned, kept, held, tested, names)


def tests_of(names: Sequence[str], test_owners: np.ndarray) -> list[np.ndarray]:
    """The test rows of each client."""
    number = {name: client for client, name in enumerate(names)}
    clients = np.array([number[str(owner)] for owner in test_owners.tolist()], np.int64)
    order = np.argsort(clients, kind="stable")
    return np.split(order, np.cumsum(np.bincount(clients, minlength=len(names))))[:-1]


def divide(
    settings: PrepareSettings, examples: Examples, kept: np.ndarray | None = None, labels: np.ndarray | None = None
) -> list[np.ndarray]:
    """The rows of each client, out of all training rows or of those that are ``kept``."""
    kept = np.arange(len(examples.targets)) if kept is None else kept
    labels = strata_of(examples, settings.strata) if labels is None else labels
    owners = examples.owners if settings.partition == "natural" else None
    if owners is not None and owners.dtype.kind == "f" and np.isnan(owners).any():
        row = int(np.isnan(owners).argmax())
        raise UserError(f"--partition natural: row {row} has the owner nan, expected a name or a number for each row")
    if owners is not None and (lost := np.setdiff1d(owners, owners[kept])).size:
        raise UserError(f"--validation: got {settings.validation:g}, which leaves owner {lost[0]} no row: give less")
    if labels is None and settings.partition in ("dirichlet", "pathological"):
        raise UserError(
            f"--partition {settings.partition}: the data has neither classes nor one number as its target, expected "
            "--partition iid or natural"
        )
    classes = examples.classes if _classified(examples) else 1 + int(labels.max() if labels is not None else 0)
    clients = settings.clients_for(len(kept)) if owners is None else len(np.unique(owners))
    check_memory(clients * classes * CELL_BYTES, f"{clients} clients with {classes} classes")
    labels = np.zeros(len(kept), int) if labels is None else labels[kept]
    owners = None if examples.owners is None else examples.owners[kept]
    parts = partition(settings.rule, labels, classes, clients, settings.seed, owners)
    owned = [kept[part] for part in parts]
    if settings.clients is not None and len(owned) != settings.clients:
        raise UserError(
            f"--clients: got {settings.clients}, but the data has {len(owned)} owners: leave it out, or divide all "
            "examples anew with --partition dirichlet"
        )
    check_silos(settings.silos_for(len(owned)), len(owned))
    return owned


def describe(settings: PrepareSettings, source: str, examples: Examples, division: Division) -> dict[str, Any]:
    """The manifest without its files. Nothing in it depends on the machine, the time or a path."""
    images, owned = isinstance(examples, ImageSet), division.owned
    what = about_images(settings, examples, division) if images else about_arrays(settings, examples, division)
    by_class = {}
    if _classified(examples):
        counts = [np.bincount(examples.targets[part], minlength=examples.classes).tolist() for part in owned]
        by_class = {"counts": counts}
    return {
        "format": 1 if images else 2,
        "dataset": settings.dataset,
        **what,
        "clients": len(owned),
        "silos": settings.silos_for(len(owned)),
        "partition": asdict(settings.rule),
        "seed": settings.seed,
        **({"validation": settings.validation} if settings.validation else {}),
        **({"resize": settings.resize} if settings.resize else {}),
        **({"test_share": examples.test_share} if examples.test_share else {}),
        "source": source,
        "class_names": examples.class_names,
        "client_names": [as_text(name) for name in division.names],
        "client_sha256": client_checksums(examples, division),
        **by_class,
    }


def _classified(examples: Examples) -> bool:
    return isinstance(examples, ImageSet) or examples.labelled


def about_images(settings: PrepareSettings, examples: Examples, division: Division) -> dict[str, Any]:
    """What a manifest of format 1 says of its images."""
    assert isinstance(examples, ImageSet)
    mean, std = sources.statistics(settings.dataset, examples.train_images, division.kept)
    shape = list(examples.train_images.shape[1:])
    return {"classes": examples.classes, "image_shape": shape, "mean": list(mean), "std": list(std)}


def about_arrays(settings: PrepareSettings, examples: Examples, division: Division) -> dict[str, Any]:
    """What a manifest of format 2 says of its arrays."""
    assert isinstance(examples, ArraySet)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if examples.image:
        assert isinstance(examples.inputs, np.ndarray)
        mean, std = sources.statistics(settings.dataset, examples.inputs, division.kept)
    inputs = {}
    for name, array in named(examples.inputs).items():
        inputs[name] = stored_as(array, named(examples.test_inputs)[name], 0 if examples.image else None)
        if examples.task == "next-token":
            inputs[name]["values"] = examples.classes
        if settings.normalised == "pooled" and values_of(array).dtype.kind == "f":
            inputs[name] |= dict(zip(("mean", "std"), statistics(array, division.kept), strict=True))
    return {
        "task": examples.task,
        "loss": examples.loss,
        "classes": examples.classes,
        "image": examples.image,
        "inputs": inputs if isinstance(examples.inputs, dict) else inputs[""],
        "targets": stored_as(examples.targets),
        "mean": list(mean),
        "std": list(std),
        "normalise": settings.normalised if has_floats(examples.inputs) else "none",
        "edges": time_edges(examples.targets[division.kept]) if examples.task == "survival" else [],
        "feature_names": examples.feature_names,
        "reading": settings.recorded,
        "sizes": [len(part) for part in division.owned],
        "test_sizes": division.test_sizes,
    }


def stored_as(array: Rows, test: Rows | None = None, number: int | None = 0) -> dict[str, Any]:
    """The entry of an array in the manifest; ``number``: how many values it has, None to count them."""
    values, parts = values_of(array), [array] if test is None else [array, test]
    if number is None:
        number = how_many([values_of(part) for part in parts])
    entry = {"dtype": values.dtype.name, "shape": list(values.shape[1:])}
    if isinstance(array, Ragged):
        width = max(longest(part) for part in parts if isinstance(part, Ragged))
        entry |= {"shape": [max(1, width), *values.shape[1:]], "ragged": True}
    return {**entry, **({"values": number} if number else {})}


def how_many(parts: list[np.ndarray]) -> int:
    """One more than the largest integer; 0 for other types, and where some are negative or beyond any vocabulary."""
    if any(part.dtype.kind not in "iu" or not part.size for part in parts) or min(part.min() for part in parts) < 0:
        return 0
    largest = max(int(part.max()) for part in parts)
    return largest + 1 if largest < MOST_VALUES else 0


def refuse_other_settings(settings: PrepareSettings, present: Manifest) -> None:
    """Raise if the shards that are there were prepared with other settings or from other raw data."""
    kind = present.partition.get("kind")
    settings = settings.decided(owners=kind == "natural", stratified=kind != "iid")
    usual_share = table.TEST_SHARE if settings.dataset == "csv" else TEST_SHARE
    pairs = {
        "dataset": (present.dataset, settings.dataset),
        "clients": (present.clients, settings.wanted_clients or present.clients),
        "silos": (present.silos, settings.silos_for(present.clients)),
        "resize": (present.resize, settings.resize),
        "test_share": (present.test_share, settings.test_share or usual_share * bool(present.test_share)),
        "seed": (present.seed, settings.seed),
        "normalise": (present.normalise, settings.normalised if present.has_floats else "none"),
        **{name: (present.reading.get(name), settings.recorded.get(name)) for name in READING if present.format == 2},
        "validation": (present.validation, settings.validation),
    }
    pairs |= {name: (present.partition.get(name), value) for name, value in asdict(settings.rule).items()}
    differences = [f"{name} {actual} not {wanted}" for name, (actual, wanted) in pairs.items() if actual != wanted]
    raw = settings.raw or sources.raw_available(settings.dataset, settings.out.parent)
    # Raw data may have been removed once the shards were written.
    if not differences and raw and is_readable(raw) and fingerprint(settings, raw, present.source) != present.source:
        differences = ["other raw data"]
    if differences:
        raise UserError(
            f"{settings.out} holds shards prepared with other settings ({', '.join(differences)}): "
            "add --force to replace them, or choose another --out"
        )


def complete(manifest: Manifest) -> bool:
    """Whether all files are there with the right length; ``data_prep.inspect`` checks their content."""
    paths = {manifest.root / name: entry["bytes"] for name, entry in manifest.files.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def fingerprint(settings: PrepareSettings, raw: Path, like: str = "") -> str:
    """Distinguishes this raw data from other data of the same name."""
    try:
        return sources.fingerprint(settings.dataset, raw, like)
    except OSError as error:
        raise UserError(f"{error.filename or raw}: cannot be read ({error.strerror or error})") from None


def bytes_on_disk(examples: Examples, division: Division) -> int:
    count = sum(map(len, division.owned)) + len(division.held)
    headers = 16 * 1024 * (len(division.owned) + 3) + (1 << 20)
    train = _row_bytes(examples.inputs, examples.targets)
    return (
        count * train + len(examples.test_targets) * _row_bytes(examples.test_inputs, examples.test_targets) + headers
    )


def _row_bytes(inputs: Inputs, targets: np.ndarray) -> int:
    """Of one row; ragged ones by their mean."""
    sizes = [
        values_of(array).nbytes + 8 * length(array) * isinstance(array, Ragged) for array in named(inputs).values()
    ]
    return -(-(sum(sizes) + max(targets.nbytes, 8 * len(targets))) // max(1, len(targets)))
