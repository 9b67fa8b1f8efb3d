"""The speed of reading shards, compared with plain reads of the same files.

python -m data_prep.bench data/cifar10
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fedlada_mpi.data.manifest import Manifest, read_manifest, silo_file
from fedlada_mpi.data.shards import read_silos
from fedlada_mpi.settings import Parser
from fedlada_mpi.support.errors import UserError


def plain_read(path: Path) -> None:
    """The least that any reader must do: a fresh buffer, filled from the file."""
    buffer = np.empty(path.stat().st_size, dtype=np.uint8)
    with path.open("rb", buffering=0) as file:
        view, done = buffer.data, 0
        while count := file.readinto(view[done:]):
            done += count


def evict(path: Path) -> None:
    """Ask the kernel to drop a file from the page cache, so that the next read comes from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(action: Callable[[], object]) -> np.ndarray:
    """Elapsed time and processor time; the second excludes what other programs took."""
    wall, processor = time.perf_counter(), time.process_time()
    action()
    return np.array([time.perf_counter() - wall, time.process_time() - processor])


def compare(manifest: Manifest, repeats: int, cold: bool) -> tuple[np.ndarray, np.ndarray]:
    """Bytes per second (elapsed, processor) of the reader and of plain reads over all silos.

    The best of several reads counts, as in ``timeit``: other work on the machine only adds time.
    """
    best = np.zeros((2, 2))
    size = 0
    for silo in range(manifest.silos):
        path = manifest.root / silo_file(silo)
        actions = (partial(read_silos, manifest, [silo], verify=False), partial(plain_read, path))
        times = np.full((2, 2), np.inf)
        for repeat in range(2 * repeats):
            if cold:
                evict(path)
            else:
                plain_read(path)
            times[repeat % 2] = np.minimum(times[repeat % 2], seconds(actions[repeat % 2]))
        best += times
        size += path.stat().st_size
    return size / best[0], size / best[1]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m data_prep.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="directory of shards")
    parser.add_argument("--repeats", type=int, default=30, help="reads of each file by each reader [30]")
    try:
        options = parser.parse_all(arguments)
        manifest = read_manifest(options.directory)
        size = manifest.files[silo_file(0)]["bytes"]
        print(f"{manifest.root}: {manifest.silos} silo files, {size / 1e6:.1f} MB the first")
        for name, cold in (("from the page cache", False), ("from the disk", True)):
            if cold and not hasattr(os, "posix_fadvise"):
                continue
            shard, plain = compare(manifest, options.repeats, cold)
            speeds = f"shards {shard[0] / 1e6:6.0f} MB/s   plain reads {plain[0] / 1e6:6.0f} MB/s"
            elapsed, processor = shard / plain
            print(f"{name:<20} {speeds}   ratio {elapsed:.2f}   by processor time {processor:.2f}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
