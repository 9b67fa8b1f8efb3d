"""Decoding many image files at once, straight into one array."""

from __future__ import annotations

import contextlib
import io
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from ...errors import UserError, first_line
from ...processes import process_map, usable_cores
from .bounds import read_file, read_member

BATCH = 64
# Images per worker process; with fewer, starting it costs more than it saves.
WORTH_A_PROCESS = 1000
MODES = {1: "L", 3: "RGB"}
METADATA_BYTES = 32 << 20  # in an image file, in addition to twice its pixels


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
    members = None if archive is None else _members(archive, archive.stat().st_mtime_ns)
    with bombs_refused():
        for path, out in zip(paths, pixels, strict=True):
            _decode(members, path, out)
    return pixels


@contextlib.contextmanager
def bombs_refused() -> Iterator[None]:
    """Pillow refuses images of far too many pixels, and only warns of somewhat fewer: here, that is refused too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


@lru_cache(maxsize=1)
def _members(archive: Path, modified: int) -> zipfile.ZipFile:
    """The archive, opened once per process: reading the directory of a large one takes longer than a batch."""
    return zipfile.ZipFile(archive)


def _decode(members: zipfile.ZipFile | None, path: str, out: np.ndarray) -> None:
    most = METADATA_BYTES + 2 * out.nbytes
    with decoding(path):
        content = read_member(members, path, most) if members else read_file(Path(path), most)
        with Image.open(io.BytesIO(content)) as image:
            size, expected = f"{image.height}x{image.width}", f"{out.shape[0]}x{out.shape[1]}"
            if size != expected:
                raise UserError(f"{path}: image of {size} among images of {expected}, expected one size")
            out[...] = np.asarray(image.convert(MODES[out.shape[2]])).reshape(out.shape)


@contextlib.contextmanager
def decoding(path: str) -> Iterator[None]:
    """Name the file in whatever goes wrong with it: on a damaged one, decoders raise almost any exception."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{path}: cannot be decoded ({first_line(error)}), expected a complete image: copy it again"
        ) from None
