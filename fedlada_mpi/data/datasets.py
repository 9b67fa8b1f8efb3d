"""From ``--dataset`` to the settings of a run and its shards, which are prepared if the raw data is there.

The shards of data set NAME are in ``data/NAME``. A run that asks for another partition of the same data gets a
directory of its own next to it, ``data/NAME-20clients-dirichlet0.1``, which is prepared once, from the raw data:
shards cannot be divided again, as ``refill`` repeats some images and leaves out others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..algorithms import resolve
from ..rundir import lock
from ..settings import DATASETS, PRESETS, SETTINGS, SHIPPED, Config, Resolved, coerce, flag
from ..support.disk import WriteError
from ..support.errors import UserError, first_line, shortened
from ..support.inputs import check_path
from ..support.suggestions import did_you_mean
from .manifest import ARRAYS, MANIFEST, Manifest, data_root, prepare_command, read_manifest
from .partition import KINDS, USED_BY
from .silos.files import Public

if TYPE_CHECKING:
    from .settings import PrepareSettings

PREPARING = threading.Lock()  # threads of one process would write to the same temporary folder
SILOS = 64  # files of a partition that a run prepares, for up to as many ranks
WAIT_SECONDS = 0.5
MOST_NAMES = 10  # of data sets, in an error

# For arrays that are no images, unless a run names one.
MODELS = {
    "classification": "mlp",
    "multilabel": "mlp",
    "regression": "linear",
    "survival": "linear",
    "segmentation": "fcn",
    "next-token": "causal_cnn",
}

# Settings of a run that its shards fix, and the names of these settings in the manifest.
_FIXED = {name: name for name in ("clients", "dirichlet", "exhausted", "classes_per_client", "size_sigma")}
_FIXED |= {"partition": "kind", "partition_seed": "seed", "validation": "validation"}


class NoShardsError(UserError):
    """``--dataset`` names no shards that there are."""


def resolve_dataset(flags: Mapping[str, Any], file: Mapping[str, Any], recorded: bool = False) -> tuple[Resolved, Path]:
    """The run's settings, and the directory where its shards are or will be; see ``algorithms.resolve``."""
    resolved = resolve_with_data(flags, file, recorded)
    return resolved, directory_of(resolved.config)


def resolve_with_data(flags: Mapping[str, Any], file: Mapping[str, Any], recorded: bool = False) -> Resolved:
    """The run's settings, with what its data set or its shards fix."""
    given = {**file, **flags}
    name = str(given.get("dataset", "digits"))
    if name in DATASETS:
        if PRESETS[name].get("partition") == "natural" and "dirichlet" in given and "partition" not in given:
            flags = {**flags, "partition": "dirichlet"}
        return resolve(flags, file, recorded=recorded)
    check_path(name, "--dataset")
    data_dir = coerce(SETTINGS["data_dir"], given.get("data_dir", ""))
    check_path(data_dir, "--data-dir")
    base = _base(name, data_dir)
    if not (base / MANIFEST).is_file():
        root = data_root(data_dir)
        names = _prepared(root)
        there = f"; {root} has {', '.join(names[:MOST_NAMES])}{', ...' * (len(names) > MOST_NAMES)}" if names else ""
        known = f"one of {', '.join(DATASETS)}, or what python -m data_prep has written{there}"
        hint = did_you_mean(name, [*DATASETS, *names])
        raise NoShardsError(f"--dataset: got {shortened(name)}, expected {known}{hint}")
    manifest = read_manifest(base)
    shards = {k: v for k, v in _prepared_with(manifest).items() if v is not None}
    if manifest.format == 2:
        shards |= {"task": manifest.task, "loss": manifest.loss} if manifest.task else {}
        if not manifest.image:
            shards["model"] = MODELS.get(str(given.get("task", manifest.task)), "linear")
    if not recorded and "dirichlet" in given and "partition" not in given:
        shards["partition"] = "dirichlet"
    return resolve(flags, file, dataset_kind=manifest.dataset, shards=shards, recorded=recorded)


def resolve_silos(
    flags: Mapping[str, Any], file: Mapping[str, Any], recorded: bool, known: tuple[Public, int] | None
) -> Resolved:
    """The settings of a run whose silos have their own data; ``known``: what they have in common, and their clients."""
    given = {**({} if recorded else file), **flags}
    if odd := next((name for name in ("dataset", "data_dir", *_FIXED) if name in given), None):
        raise UserError(f"--{flag(odd)} has no effect on data that silos have prepared (--silo-dir): leave it out")
    shards: dict[str, Any] = {"dataset": "silos", "partition": "natural"}
    if known is not None:
        common, clients = known
        shards |= {"dataset": common.dataset, "clients": clients}
        shards |= {"task": common.task, "loss": common.loss} if common.task else {}
        if not common.image:
            shards["model"] = MODELS.get(str({**file, **flags}.get("task", common.task)), "linear")
    return resolve(flags, file, dataset_kind=str(shards["dataset"]), shards=shards, recorded=recorded)


def directory_of(config: Config) -> Path:
    """Where the shards of a run are, or will be: those of its data set, or a partition of their own next to them."""
    base = _base(config.dataset, config.data_dir)
    if (base / MANIFEST).is_file():
        fits = not _differences(config, read_manifest(base))
    else:
        preset = PRESETS.get(config.dataset, {})
        usual = {name: preset.get(name, SETTINGS[name].default) for name in _FIXED}
        fits = config.dataset not in DATASETS or _fixed(config) == _fixed(Config(**usual))
    return base if fits else base.with_name(f"{base.name}-{_partition_name(config)}")


def _base(dataset: str, data_dir: str) -> Path:
    """The shards that ``--dataset`` names, a directory or a name in the data root."""
    root = data_root(data_dir)
    if dataset in DATASETS or (not (Path(dataset) / MANIFEST).is_file() and (root / dataset / MANIFEST).is_file()):
        return root / dataset
    path = Path(dataset)
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def _prepared(root: Path) -> list[str]:
    """The names of the data sets in the data root."""
    try:
        return sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
    except OSError:
        return []


def _fixed(config: Config) -> dict[str, Any]:
    """What the shards of this run must have been prepared with; without what its partition does not use."""
    return {n: getattr(config, n) for n in _FIXED if config.partition in USED_BY.get(n, KINDS)}


def _partition_name(config: Config) -> str:
    """All that distinguishes a partition, without what is usual."""
    kind = {"dirichlet": repr(config.dirichlet), "pathological": str(config.classes_per_client)}
    parts = [f"{config.clients}clients", config.partition + kind.get(config.partition, "")]
    fixed = _fixed(config)
    words = {"exhausted": "", "size_sigma": "sigma", "partition_seed": "seed", "validation": "validation"}
    for name, word in words.items():
        if name in fixed and fixed[name] != SETTINGS[name].default:
            parts.append(f"{word}{fixed[name]}")
    return "-".join(parts)


def _prepared_with(manifest: Manifest) -> dict[str, Any]:
    """The settings that these shards fix, None for those that their partition does not use."""
    known = {**manifest.partition, "clients": manifest.clients, "seed": manifest.seed}
    known["validation"] = manifest.validation
    return {name: known.get(key) for name, key in _FIXED.items()}


def _differences(config: Config, manifest: Manifest) -> dict[str, Any]:
    """What shards were prepared with where the run asks for something else."""
    found = _prepared_with(manifest)
    return {name: value for name, value in found.items() if value is not None and value != getattr(config, name)}


def ensure(
    config: Config, directory: Path, silos: int, report: Callable[[str], None] = lambda message: None
) -> Manifest:
    """The manifest of this run's shards, which are prepared now if they are missing."""
    with PREPARING:
        if not (directory / MANIFEST).is_file():
            _prepare(config, directory, silos, report)
    manifest, base = read_manifest(directory), _base(config.dataset, config.data_dir)
    for name, value in _differences(config, manifest).items():
        raise UserError(
            f"the shards in {directory} were prepared with {name} {value}, but the run asks for "
            f"{getattr(config, name)}: rm -r {directory} and run it again"
        )
    if directory != base and (base / MANIFEST).is_file() and _origin(manifest) != _origin(read_manifest(base)):
        raise UserError(
            f"the shards in {directory} were prepared from other raw data than those in {base}: rm -r {directory} and "
            "run it again"
        )
    return manifest


def _origin(manifest: Manifest) -> tuple[Any, ...]:
    """What two partitions of the same data have in common."""
    return manifest.dataset, manifest.source, manifest.resize, manifest.test_share, manifest.reading, manifest.normalise


def _prepare(config: Config, directory: Path, silos: int, report: Callable[[str], None]) -> None:
    # Imported here: a run whose shards are ready does not need the image decoders.
    from .prepare import fingerprint, prepare
    from .settings import PrepareSettings
    from .sources import raw_available

    base = _base(config.dataset, config.data_dir)
    near = read_manifest(base) if (base / MANIFEST).is_file() else None
    kind = config.dataset if near is None else near.dataset
    raw = near.raw if near is not None and near.raw is not None else raw_available(kind, base.parent)
    silos = min(silos if directory == base else SILOS, config.clients)
    settings = PrepareSettings(
        kind,
        out=directory,
        raw=None if kind in SHIPPED else raw,
        resize=near.resize if near else 0,
        normalise=near.normalise if near and near.has_floats else "",
        **(near.reading if near else {}),
        test_share=near.test_share or None if near else None,
        clients=config.clients,
        silos=silos,
        partition=config.partition,
        dirichlet=config.dirichlet if config.partition == "dirichlet" else None,
        exhausted=config.exhausted,
        classes_per_client=config.classes_per_client,
        size_sigma=config.size_sigma,
        seed=config.partition_seed,
        validation=config.validation,
        download=False,
    )
    if near is None and raw is None:
        raise UserError(
            f"no shards of {kind} in {directory} and no raw data next to them; prepare them with: " + _command(settings)
        )
    if near is not None:
        name, value = next(iter(_differences(config, near).items()))
        differs = (
            f"the shards in {base} were prepared with {name} {value}, but the run asks for {getattr(config, name)}"
        )
        if kind == ARRAYS:
            raise UserError(f"{differs}: add --{flag(name)} {value}, or divide the arrays so")
        if raw is None:
            other = f"prepare others with {_command(settings)} and run it again"
            raise UserError(f"{differs}, and their raw data is not there: add --{flag(name)} {value}, or {other}")
        if fingerprint(settings, raw, near.source) != near.source:
            raise UserError(f"{differs}, and {raw} has changed since: prepare both from it, first with {near.command}")
    with _alone(directory, report):
        if not (directory / MANIFEST).is_file():
            report(f"preparing {directory}, once for all runs with these settings")
            prepare(settings, like=near.source if near else "")


@contextmanager
def _alone(directory: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Of all processes that want these shards, one is inside the block at a time; the others wait for it."""
    waiting = False
    with ExitStack() as held:
        while True:
            try:
                # Beside the directory, which has the shards and nothing else.
                held.enter_context(lock.hold(directory.parent, f".{directory.name}.lock"))
                break
            except lock.Busy:
                if not waiting:
                    report(f"waiting for another run, which prepares {directory}")
                waiting = True
                time.sleep(WAIT_SECONDS)
            except WriteError as error:
                raise UserError(
                    f"{directory}: cannot be prepared ({first_line(error)}): make {directory.parent} writable, or give "
                    "another --data-dir"
                ) from None
        yield


def _command(settings: PrepareSettings) -> str:
    """The data_prep command for these shards."""
    options = {name: getattr(settings, name) for name in ("clients", "silos")}
    options |= {**asdict(settings.rule), "seed": settings.seed, "validation": settings.validation}
    options |= {"resize": settings.resize, "test_share": settings.test_share, **settings.recorded}
    options |= {"normalise": settings.normalise or None}
    return prepare_command(settings.dataset, settings.out, options, settings.raw)
