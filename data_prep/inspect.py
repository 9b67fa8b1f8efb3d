"""Verify a directory of shards, print its contents and draw its label distribution.

python -m data_prep.inspect data/cifar10
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedlada_mpi.data.manifest import TEST_FILE, VALIDATION_FILE, Manifest, Stored, read_manifest, silo_file
from fedlada_mpi.data.picture import PICTURE, draw
from fedlada_mpi.data.shards import check_files, read_silos, read_test
from fedlada_mpi.data.sources.base import KNOWN
from fedlada_mpi.settings import Parser
from fedlada_mpi.support.errors import UserError


def verify(manifest: Manifest) -> None:
    """Read every file: checksum, format, shapes, and labels that agree with the manifest."""
    check_files(manifest, list(manifest.files), trust_cache=False)
    for silo in range(manifest.silos):
        read_silos(manifest, [silo], verify=False)
    for name in _sets(manifest):
        read_test(manifest, verify=False, name=name)


def table(manifest: Manifest) -> str:
    """One row per file, then the totals."""
    what = "images" if manifest.image else "rows"
    rows = [("file", "clients", what, f"{what}/client", "classes/client", "MB")]
    for silo, clients in enumerate(manifest.client_ids):
        entry = manifest.files[silo_file(silo)]
        rows.append((silo_file(silo), f"{clients[0]}-{clients[-1]}", *_figures(manifest, clients), _megabytes(entry)))
    for name in _sets(manifest):
        rows.append((name, "", f"{manifest.rows(name):,}", "", "", _megabytes(manifest.files[name])))
    everyone = np.arange(manifest.clients)
    total = {"bytes": sum(entry["bytes"] for entry in manifest.files.values())}
    rows.append(("all silos", f"{manifest.clients}", *_figures(manifest, everyone), _megabytes(total)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((name.ljust(widths[0]), *right)))
    return "\n".join((lines[0], "-" * len(lines[0]), *lines[1:]))


def _sets(manifest: Manifest) -> list[str]:
    """The files of images that belong to no client."""
    return [name for name in (TEST_FILE, VALIDATION_FILE) if name in manifest.files]


def heading(manifest: Manifest) -> str:
    rule = ", ".join(f"{name} {value}" for name, value in manifest.partition.items() if value is not None)
    held_out = f", {manifest.validation:g} held out for validation" if manifest.validation else ""
    return (
        f"{manifest.root}: {_about(manifest)}\npartition: {rule}, seed {manifest.seed}{held_out}\n{_values(manifest)}"
    )


def _about(manifest: Manifest) -> str:
    height, width, channels = manifest.image_shape
    if manifest.format == 1:
        return f"{manifest.dataset}, {manifest.classes} classes, {height}x{width}x{channels}"
    names = {"inputs" + f" {name}" * bool(name): stored for name, stored in manifest.arrays.items()}
    arrays = [f"{name} {_array(stored)}" for name, stored in {**names, "targets": manifest.targets}.items()]
    classes = f", {manifest.classes} classes" if manifest.classes else ""
    return f"{manifest.dataset}, {manifest.task or 'no task'}{classes}, {', '.join(arrays)}"


def _array(stored: Stored) -> str:
    return f"{stored.dtype} {list(stored.shape)}{' ragged' * stored.ragged}"


def _values(manifest: Manifest) -> str:
    """How values are normalised, and who has test rows."""
    if manifest.image:
        ours = " (ours: the paper states none)" if manifest.dataset in KNOWN else ""
        line = f"mean {_decimals(manifest.mean)}, std {_decimals(manifest.std)}{ours}"
    else:
        line = f"normalised: {manifest.normalise}"
    own, tested = int(manifest.test_sizes.sum()), int((manifest.test_sizes > 0).sum())
    return f"{line}\n{own:,} test rows of their own with {tested} of {manifest.clients} clients" if own else line


def _figures(manifest: Manifest, clients: np.ndarray) -> tuple[str, str, str]:
    sizes = manifest.sizes[clients]
    present = f"{(manifest.counts[clients] > 0).sum(axis=1).mean():.1f}" if manifest.counts.size else ""
    span = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()}-{sizes.max()}"
    return f"{sizes.sum():,}", span, present


def _megabytes(entry: dict[str, Any]) -> str:
    return f"{entry['bytes'] / 1e6:.1f}"


def _decimals(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m data_prep.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="directory of shards")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw here [DIR/label_distribution.png if it is missing]"
    )
    try:
        options = parser.parse_all(arguments)
        manifest = read_manifest(options.directory)
        print(heading(manifest), table(manifest), sep="\n\n")
        verify(manifest)
        picture = options.picture or manifest.root / PICTURE
        if options.picture or not picture.exists():
            draw(manifest, picture)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or options.directory}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"\nall {len(manifest.files)} checksums are right; label distribution: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
