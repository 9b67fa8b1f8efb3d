"""Decoding many image files at once, straight into one array."""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from ...support.errors import UserError, first_line
from ...support.processes import process_map, usable_cores
from ...support.warning_filters import warning_filter
from .bounds import read_file, read_member

if TYPE_CHECKING:  # imported where images are decoded: no run on prepared data waits for it
    from PIL import Image

BATCH = 64
# Images per worker process; with fewer, starting it costs more than it saves.
WORTH_A_PROCESS = 1000
MODES = {1: "L", 3: "RGB"}
METADATA_BYTES = 32 << 20  # in an image file, in addition to twice its pixels
NAMED = 5  # of many damaged images

# From an image and the shape [H, W, C] that is wanted to an image in the mode of C, or a UserError without its path.
Fit = Callable[["Image.Image", tuple[int, ...]], "Image.Image"]


def as_stored(image: Image.Image, shape: tuple[int, ...]) -> Image.Image:
    return image.convert(MODES[shape[2]])


def decode_all(
    paths: Sequence[str],
    out: np.ndarray,
    archive: Path | None = None,
    workers: int = 0,
    name: str = "images",
    fit: Fit = as_stored,
    most: int = 0,
) -> None:
    """Fill ``out`` [n, H, W, C] with the decoded ``paths`` (members of ``archive`` if given).

    ``most``: bytes that a file may have; 0 for what an image of this shape can need.
    """
    workers = min(workers or usable_cores(), len(paths) // WORTH_A_PROCESS)
    batches = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
    most = most or METADATA_BYTES + 2 * out[:1].nbytes
    decode = partial(decode_batch, archive=archive, shape=out.shape[1:], fit=fit, most=most)
    done, refused = 0, dict[str, str]()
    try:
        # disable=None: no bar unless standard error is a terminal.
        with tqdm(total=len(paths), desc=f"decoding {name}", unit=" images", disable=None) as progress:
            for pixels, odd in process_map(decode, batches, workers):
                out[done : done + len(pixels)] = pixels
                done += len(pixels)
                refused |= odd
                progress.update(len(pixels))
    except BrokenProcessPool:
        raise UserError(f"a process decoding {name} ended early: run again with --workers 1 to see why") from None
    refuse(refused, len(paths))


def refuse(refused: Mapping[str, str], count: int) -> None:
    """Raise, if any of ``count`` images was refused: why the first one, how many there are, and their names."""
    if not refused:
        return
    first, *others = refused
    named = ", ".join(others[:NAMED]) + ", ..." * (len(others) > NAMED)
    more = f" (and {len(others)} more of {count} images: {named})" if others else ""
    raise UserError(refused[first] + more)


def decode_batch(
    paths: Sequence[str], archive: Path | None, shape: tuple[int, ...], fit: Fit, most: int
) -> tuple[np.ndarray, dict[str, str]]:
    """Pixels of the images, [n, H, W, C], and those that are refused, with the reason."""
    from PIL import Image

    pixels, refused = np.empty((len(paths), *shape), dtype=np.uint8), {}
    members = None if archive is None else _members(archive, archive.stat().st_mtime_ns)
    with bombs_refused():
        for path, out in zip(paths, pixels, strict=True):
            try:
                with decoding(path):
                    content = read_member(members, path, most) if members else read_file(Path(path), most)
                    with Image.open(io.BytesIO(content)) as image:
                        try:
                            fitted = fit(image, shape)
                        except UserError as error:
                            raise UserError(f"{path}: {error}") from None
                        size, expected = f"{fitted.height}x{fitted.width}", f"{shape[0]}x{shape[1]}"
                        if size != expected:
                            raise UserError(f"{path}: image of {size} among images of {expected}, expected one size")
                        out[...] = np.asarray(fitted).reshape(out.shape)
            except UserError as error:
                refused[path] = str(error)
    return pixels, refused


@contextlib.contextmanager
def bombs_refused() -> Iterator[None]:
    """Pillow refuses images of far too many pixels, and only warns of somewhat fewer: here, that is refused too."""
    from PIL import Image

    with warning_filter("error", Image.DecompressionBombWarning):
        yield


@lru_cache(maxsize=1)
def _members(archive: Path, modified: int) -> zipfile.ZipFile:
    """The archive, opened once per process: reading the directory of a large one takes longer than a batch."""
    return zipfile.ZipFile(archive)


@contextlib.contextmanager
def decoding(path: str) -> Iterator[None]:
    """Name the file in whatever goes wrong with it: on a damaged one, decoders raise almost any exception."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        why = re.sub(r" <\S+ object at 0x[0-9a-f]+>", "", first_line(error))  # a file in memory, to Pillow
        raise UserError(f"{path}: cannot be decoded ({why}), expected a complete image: copy it again") from None
