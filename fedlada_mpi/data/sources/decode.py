"""Decoding many image files at once, straight into one array."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from ...errors import UserError
from ...processes import process_map, usable_cores

BATCH = 64
# Images per worker process; with fewer, starting it costs more than it saves.
WORTH_A_PROCESS = 1000
MODES = {1: "L", 3: "RGB"}


def decode_all(
    paths: Sequence[str], out: np.ndarray, archive: Path | None = None, workers: int = 0, name: str = "images"
) -> None:
    """Fill ``out`` [n, H, W, C] with the decoded ``paths`` (members of ``archive`` if given)."""
    workers = min(workers or usable_cores(), len(paths) // WORTH_A_PROCESS)
    batches = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
    decode = partial(decode_batch, archive=archive, shape=out.shape[1:])
    done = 0
    try:
        # disable=None: no bar unless standard error is a terminal.
        with tqdm(total=len(paths), desc=f"decoding {name}", unit=" images", disable=None) as progress:
            for pixels in process_map(decode, batches, workers):
                out[done : done + len(pixels)] = pixels
                done += len(pixels)
                progress.update(len(pixels))
    except BrokenProcessPool:
        raise UserError(f"a process decoding {name} ended early: run again with --workers 1 to see why") from None


def decode_batch(paths: Sequence[str], archive: Path | None, shape: tuple[int, ...]) -> np.ndarray:
    """Pixels of the images, [n, H, W, C]; grey becomes RGB where C is 3."""
    pixels = np.empty((len(paths), *shape), dtype=np.uint8)
    read = _read_file if archive is None else _members(archive, archive.stat().st_mtime_ns).read
    for path, out in zip(paths, pixels, strict=True):
        _decode(read, path, out)
    return pixels


def _read_file(path: str) -> bytes:
    return Path(path).read_bytes()


@lru_cache(maxsize=1)
def _members(archive: Path, modified: int) -> zipfile.ZipFile:
    """The archive, opened once per process: reading the directory of a large one takes longer than a batch."""
    return zipfile.ZipFile(archive)


def _decode(read: Callable[[str], bytes], path: str, out: np.ndarray) -> None:
    try:
        with Image.open(io.BytesIO(read(path))) as image:
            size, expected = f"{image.height}x{image.width}", f"{out.shape[0]}x{out.shape[1]}"
            if size != expected:
                raise UserError(f"{path}: image of {size} among images of {expected}, expected one size")
            out[...] = np.asarray(image.convert(MODES[out.shape[2]])).reshape(out.shape)
    except (
        OSError,
        SyntaxError,
        ValueError,
        KeyError,
        zipfile.BadZipFile,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        raise UserError(f"{path}: cannot be decoded ({error}), expected a complete image: copy it again") from None
