"""From ``--dataset`` to the settings of a run and its shards, which are prepared if the raw data is there."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import DATASETS, Config, Resolved, data_root, flag, resolve
from ..errors import UserError, did_you_mean, shortened
from ..inputs import check_path
from .manifest import MANIFEST, Manifest, prepare_command, read_manifest

PREPARING = threading.Lock()  # threads of one process would write to the same temporary folder

# Settings of a run that its shards fix, and the names of these settings in the manifest.
_FIXED = {name: name for name in ("clients", "dirichlet", "exhausted", "classes_per_client", "size_sigma")}
_FIXED |= {"partition": "kind", "partition_seed": "seed", "validation": "validation"}


def settle(flags: Mapping[str, Any], file: Mapping[str, Any], recorded: bool = False) -> tuple[Resolved, Path]:
    """The run's settings, and the directory where its shards are or will be; see ``config.resolve``."""
    name = str({**file, **flags}.get("dataset", "digits"))
    if name in DATASETS:
        resolved = resolve(flags, file, recorded=recorded)
        return resolved, directory_of(name, resolved.config.data_dir)
    check_path(name, "--dataset")
    if not (Path(name) / MANIFEST).is_file():
        known = f"one of {', '.join(DATASETS)}, or a directory that python -m data_prep --out has written"
        raise UserError(f"--dataset: got {shortened(name)}, expected {known}{did_you_mean(name, DATASETS)}")
    manifest = read_manifest(name)
    shards = {k: v for k, v in _prepared_with(manifest).items() if v is not None}
    return resolve(flags, file, dataset_kind=manifest.dataset, shards=shards, recorded=recorded), Path(name)


def directory_of(dataset: str, data_dir: str) -> Path:
    """Where the shards of ``--dataset`` are."""
    return data_root(Config(data_dir=data_dir)) / dataset if dataset in DATASETS else Path(dataset)


def _prepared_with(manifest: Manifest) -> dict[str, Any]:
    """The settings that these shards fix, None for those that their partition does not use."""
    known = {**manifest.partition, "clients": manifest.clients, "seed": manifest.seed}
    known["validation"] = manifest.validation
    return {name: known.get(key) for name, key in _FIXED.items()}


def ensure(config: Config, directory: Path, silos: int) -> Manifest:
    """The manifest of this run's shards, which are prepared now if they are missing."""
    with PREPARING:
        return _ensure(config, directory, silos)


def _ensure(config: Config, directory: Path, silos: int) -> Manifest:
    if not (directory / MANIFEST).is_file():
        # Imported here: a run whose shards are ready does not need the image decoders.
        from .prepare import prepare
        from .settings import PrepareSettings
        from .sources import raw_available

        raw = raw_available(config.dataset, directory.parent)
        if raw is None and config.dataset != "digits":
            raise UserError(
                f"no shards of {config.dataset} in {directory} and no raw data next to them; prepare them with: "
                + command(config, directory, silos)
            )
        settings = PrepareSettings(
            config.dataset,
            out=directory,
            raw=None if config.dataset == "digits" else raw,
            clients=config.clients,
            silos=min(silos, config.clients),
            partition=config.partition,
            dirichlet=config.dirichlet if config.partition == "dirichlet" else None,
            exhausted=config.exhausted,
            classes_per_client=config.classes_per_client,
            size_sigma=config.size_sigma,
            seed=config.partition_seed,
            validation=config.validation,
            download=False,
        )
        return prepare(settings)
    manifest = read_manifest(directory)
    for name, value in _prepared_with(manifest).items():
        wanted = getattr(config, name)
        if value is not None and value != wanted:
            prepare_others = command(config, directory, silos, suffix=f"-{name}-{wanted}")
            raise UserError(
                f"the shards in {directory} were prepared with {name} {value}, but the run asks for {wanted}: "
                f"add --{flag(name)} {value}, or prepare others with {prepare_others} and pass that as --dataset"
            )
    return manifest


def command(config: Config, directory: Path, silos: int, suffix: str = "") -> str:
    """The data_prep command for this run."""
    kind = config.dataset if config.dataset in DATASETS else read_manifest(directory).dataset
    dealt = config.partition in ("dirichlet", "pathological")
    options: dict[str, Any] = {
        "clients": config.clients,
        "silos": min(silos, config.clients),
        "partition": config.partition,
        "dirichlet": config.dirichlet if config.partition == "dirichlet" else None,
        "exhausted": config.exhausted if dealt else None,
        "classes_per_client": config.classes_per_client if config.partition == "pathological" else None,
        "size_sigma": config.size_sigma,
        "seed": config.partition_seed,
        "validation": config.validation,
    }
    return prepare_command(kind, f"{directory}{suffix}", options)
