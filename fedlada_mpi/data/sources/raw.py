"""The search for raw data, and the download of CIFAR where there is none.

Under a data root, the raw data of data set NAME is searched for in ``raw/``, ``NAME/raw/`` and the
root itself: the official archive, its unpacked folder, or ``NAME.npz``.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from ...settings import SHIPPED
from ...support.errors import UserError
from . import cifar, tinyimagenet
from .npz import DIGITS

DOWNLOADABLE = {"cifar10": ("CIFAR10", cifar.CIFAR10), "cifar100": ("CIFAR100", cifar.CIFAR100)}
OFFICIAL_NAMES = {
    "cifar10": (cifar.CIFAR10.archive, cifar.CIFAR10.folder),
    "cifar100": (cifar.CIFAR100.archive, cifar.CIFAR100.folder),
    "tinyimagenet": (f"{tinyimagenet.FOLDER}.zip", tinyimagenet.FOLDER),
}


def raw_available(dataset: str, root: str | os.PathLike) -> Path | None:
    """The raw data of ``dataset`` under a data root, or None; what ships with the package is always there."""
    if dataset in SHIPPED:
        return DIGITS if dataset == "digits" else DIGITS.parent
    root = Path(root)
    for place in (root / "raw", root / dataset / "raw", root):
        for name in (*OFFICIAL_NAMES.get(dataset, ()), f"{dataset}.npz"):
            if is_readable(place / name):
                return place / name
    return None


def find_raw(dataset: str, raw: Path | None, root: Path, download: bool) -> Path:
    """The path that the user gave, else what is under the data root, else a download."""
    if raw is not None:
        if not raw.exists():
            raise UserError(f"--raw: {raw} does not exist, expected the raw data of {dataset}")
        if not is_readable(raw):
            raise UserError(f"--raw: {raw} is not a file or folder, expected the raw data of {dataset}")
        return raw
    if available := raw_available(dataset, root):
        return available
    if dataset in DOWNLOADABLE and download:
        return fetch(dataset, root / "raw")
    if dataset in ("npz", "imagefolder", "csv", "text"):
        raise UserError(f"--dataset {dataset}: no raw data given, expected --raw PATH")
    archive = OFFICIAL_NAMES[dataset][0]
    hint = f" (from {tinyimagenet.URL})" if dataset == "tinyimagenet" else ""
    raise UserError(
        f"no raw data of {dataset} under {root}, expected {root / 'raw' / archive}{hint}: give it with --raw PATH"
    )


def is_readable(path: Path) -> bool:
    """Whether it is a file or a folder; opening a pipe or a device could block."""
    return path.is_file() or path.is_dir()


def nearest_folder(path: Path) -> Path:
    """The closest parent that exists."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


def fetch(dataset: str, folder: Path) -> Path:
    """Download the official archive into ``folder``."""
    class_name, official = DOWNLOADABLE[dataset]
    try:
        import torchvision
        from torchvision.datasets.utils import download_url
    except ImportError:
        raise UserError(
            f"downloading needs torchvision, which is not installed: give {official.archive} with --raw"
        ) from None
    source = getattr(torchvision.datasets, class_name)
    previous = socket.getdefaulttimeout()
    # A firewall that drops packets would otherwise stall the download for many minutes.
    socket.setdefaulttimeout(30)
    try:
        # In a temporary folder on the same disk until it is complete: the next run must not see half an archive.
        with tempfile.TemporaryDirectory(dir=nearest_folder(folder)) as unfinished:
            download_url(source.url, unfinished, source.filename, source.tgz_md5)
            folder.mkdir(parents=True, exist_ok=True)
            os.replace(Path(unfinished, source.filename), folder / source.filename)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot download {source.url} ({error}): download it where there is a network "
            f"and give it with --raw {source.filename}"
        ) from None
    finally:
        socket.setdefaulttimeout(previous)
    return folder / source.filename
