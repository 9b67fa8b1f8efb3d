"""Decoding many image files at once, straight into one array.

Workers are plain child processes that send pixels through a pipe: no fork of a process that may
have started MPI, no shared-memory file system, and nothing pickled. One thread per worker reads the
pixels into their final place, so no image is held decoded twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fedlada_mpi.errors import UserError

from . import decode_worker
from .decode_worker import decode, reader

BATCH = 64
# Below this many images a child process costs more than it saves.
WORTH_A_PROCESS = 1000


def cores() -> int:
    """The cores this process may use, which a batch system can limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_all(
    paths: Sequence[str], out: np.ndarray, archive: Path | None = None, workers: int = 0, name: str = "images"
) -> None:
    """Fill ``out`` [n, H, W, C] with the decoded ``paths`` (members of ``archive`` if given)."""
    workers = min(workers or cores(), len(paths) // WORTH_A_PROCESS)
    # disable=None: no bar unless standard error is a terminal.
    with tqdm(total=len(paths), desc=f"decoding {name}", unit=" images", disable=None) as progress:
        if workers <= 1:
            read = reader(str(archive) if archive else None)
            for path, pixels in zip(paths, out):
                decode(read, path, pixels)
                progress.update()
        else:
            _decode_in_processes(paths, out, archive, workers, progress)


def _decode_in_processes(
    paths: Sequence[str], out: np.ndarray, archive: Path | None, workers: int, progress: tqdm
) -> None:
    # By its file rather than with -m: the worker then starts without importing the rest of the package.
    command = [sys.executable, decode_worker.__file__, *map(str, out.shape[1:])]
    command += [str(archive)] if archive else []
    package_root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search}
    starts = iter(range(0, len(paths), BATCH))
    lock = threading.Lock()
    errors: list[UserError] = []

    def next_batch() -> Iterator[int]:
        while not errors:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            yield start

    def feed() -> None:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as worker:
            try:
                for start in next_batch():
                    batch = paths[start : start + BATCH]
                    worker.stdin.write(json.dumps(batch).encode() + b"\n")
                    worker.stdin.flush()
                    answer = worker.stdout.readline()
                    if not answer:
                        raise UserError(
                            f"a decoding process ended near {batch[0]}: run again with --workers 1 to see why"
                        )
                    if (problem := json.loads(answer)) is not None:
                        raise UserError(problem)
                    target = memoryview(out[start : start + BATCH]).cast("B")
                    if worker.stdout.readinto(target) != len(target):
                        raise UserError(
                            f"a decoding process ended near {batch[0]}: run again with --workers 1 to see why"
                        )
                    with lock:
                        progress.update(len(batch))
            except (UserError, BrokenPipeError) as error:
                errors.append(
                    error
                    if isinstance(error, UserError)
                    else UserError("a decoding process ended early: run again with --workers 1")
                )
                worker.kill()

    threads = [threading.Thread(target=feed, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
