"""Preparation of shards: find the raw data, read it, assign it to clients, write it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..support.errors import UserError
from . import sources
from .manifest import FORMAT, MANIFEST, RAW_PATH, Manifest, read_manifest
from .partition import hold_out, partition
from .picture import PICTURE, draw
from .settings import PrepareSettings, check_silos
from .sources.bounds import check_memory
from .sources.imagefolder import TEST_SHARE
from .sources.raw import is_readable
from .write import attributes_of, client_checksum, publish, staging, write_all, write_manifest

CELL_BYTES = 32  # in the table of images per client and class, as an array, a list and text


def prepare(settings: PrepareSettings, report: Callable[[str], None] = lambda message: None) -> Manifest:
    """Write the shards that ``settings`` describe, unless they are there; ``report`` receives progress messages."""
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
    images = sources.load(settings.dataset, raw, settings.workers, **settings.reading)
    if not settings.partition and images.owners is not None:
        report("the data has owners: each is a client (--partition dirichlet divides all images anew)")
    settings = settings.decided(images.owners is not None)
    kept, held = hold_out(settings.validation, images.train_labels, settings.seed)
    owned = divide(settings, images, kept)
    manifest = describe(settings, fingerprint(settings, raw), images, kept, owned)
    report(f"writing {sum(map(len, owned))} training images of {len(owned)} clients to {manifest['silos']} silo files")
    return write_shards(settings.out, manifest, images, owned, held, settings.raw)


def write_shards(
    out: Path,
    manifest: dict[str, Any],
    images: sources.ImageSet,
    owned: list[np.ndarray],
    held: np.ndarray,
    raw: Path | None = None,
) -> Manifest:
    """Write the shards of a described data set, with its picture; ``held`` images are for validation.

    ``raw``, what the user gave, is noted for other partitions of the same data.
    """
    silos = np.array_split(np.arange(len(owned)), manifest["silos"])
    with staging(out, needed_bytes=_bytes_on_disk(images, owned, held)) as folder:
        manifest["files"] = write_all(folder, images, owned, silos, held, attributes_of(manifest))
        write_manifest(folder, manifest)
        draw(read_manifest(folder), folder / PICTURE)
        if raw is not None:
            (folder / RAW_PATH).write_bytes(os.fsencode(os.path.abspath(raw)))
        publish(folder, out, [*manifest["files"], PICTURE, *([] if raw is None else [RAW_PATH]), MANIFEST])
    return read_manifest(out)


def divide(settings: PrepareSettings, images: sources.ImageSet, kept: np.ndarray | None = None) -> list[np.ndarray]:
    """The images of each client, out of all training images or of those that are ``kept``."""
    kept = np.arange(len(images.train_labels)) if kept is None else kept
    owners = images.owners if settings.partition == "natural" else None
    if owners is not None and (lost := np.setdiff1d(owners, owners[kept])).size:
        raise UserError(f"--validation: got {settings.validation:g}, which leaves owner {lost[0]} no image: give less")
    clients = settings.clients_for(len(kept)) if owners is None else len(np.unique(owners))
    check_memory(clients * images.classes * CELL_BYTES, f"{clients} clients with {images.classes} classes")
    labels, owners = images.train_labels[kept], None if images.owners is None else images.owners[kept]
    parts = partition(settings.rule, labels, images.classes, clients, settings.seed, owners)
    owned = [kept[part] for part in parts]
    if settings.clients is not None and len(owned) != settings.clients:
        raise UserError(
            f"--clients: got {settings.clients}, but the data has {len(owned)} owners: leave it out, or divide all "
            "images anew with --partition dirichlet"
        )
    check_silos(settings.silos_for(len(owned)), len(owned))
    return owned


def describe(
    settings: PrepareSettings, source: str, images: sources.ImageSet, kept: np.ndarray, owned: list[np.ndarray]
) -> dict[str, Any]:
    """The manifest without its files. Nothing in it depends on the machine, the time or a path."""
    mean, std = sources.statistics(settings.dataset, images.train_images, kept)
    owners = images.owners if settings.partition == "natural" else None
    return {
        "format": FORMAT,
        "dataset": settings.dataset,
        "classes": images.classes,
        "image_shape": list(images.train_images.shape[1:]),
        "mean": list(mean),
        "std": list(std),
        "clients": len(owned),
        "silos": settings.silos_for(len(owned)),
        "partition": asdict(settings.rule),
        "seed": settings.seed,
        **({"validation": settings.validation} if settings.validation else {}),
        **({"resize": settings.resize} if settings.resize else {}),
        **({"test_share": images.test_share} if images.test_share else {}),
        "source": source,
        "class_names": images.class_names,
        "client_names": [] if owners is None else [str(name) for name in np.unique(owners)],
        "client_sha256": [client_checksum(images, part) for part in owned],
        "counts": [np.bincount(images.train_labels[part], minlength=images.classes).tolist() for part in owned],
    }


def refuse_other_settings(settings: PrepareSettings, present: Manifest) -> None:
    """Raise if the shards that are there were prepared with other settings or from other raw data."""
    settings = settings.decided(owners=present.partition.get("kind") == "natural")
    pairs = {
        "dataset": (present.dataset, settings.dataset),
        "clients": (present.clients, settings.wanted_clients or present.clients),
        "silos": (present.silos, settings.silos_for(present.clients)),
        "resize": (present.resize, settings.resize),
        "test_share": (present.test_share, settings.test_share or TEST_SHARE * bool(present.test_share)),
        "seed": (present.seed, settings.seed),
        "validation": (present.validation, settings.validation),
    }
    pairs |= {name: (present.partition.get(name), value) for name, value in asdict(settings.rule).items()}
    differences = [f"{name} {actual} not {wanted}" for name, (actual, wanted) in pairs.items() if actual != wanted]
    raw = settings.raw or sources.raw_available(settings.dataset, settings.out.parent)
    # Raw data may have been removed once the shards were written.
    if not differences and raw and is_readable(raw) and fingerprint(settings, raw) != present.source:
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


def fingerprint(settings: PrepareSettings, raw: Path) -> str:
    """Distinguishes this raw data from other data of the same name."""
    try:
        return sources.fingerprint(settings.dataset, raw)
    except OSError as error:
        raise UserError(f"{error.filename or raw}: cannot be read ({error.strerror or error})") from None


def _bytes_on_disk(images: sources.ImageSet, owned: list[np.ndarray], held: np.ndarray) -> int:
    count = sum(map(len, owned)) + len(held) + len(images.test_labels)
    headers = 16 * 1024 * (len(owned) + 3) + (1 << 20)
    return count * (images.train_images[0].nbytes + 8) + headers
