"""Decodes image files to raw pixels: one process of the pool in ``decode.py``.

    python decode_worker.py HEIGHT WIDTH CHANNELS [ZIP]

A request is one line of JSON on standard input, a list of paths (or names inside ZIP). The answer
is one line of JSON, null or an error text; after null follow the pixels of all images, end to end.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from fedlada_mpi.errors import UserError

MODES = {1: "L", 3: "RGB"}


def reader(archive: str | None) -> Callable[[str], bytes]:
    if archive is None:
        return lambda path: Path(path).read_bytes()
    return zipfile.ZipFile(archive).read


def decode(read: Callable[[str], bytes], path: str, out: np.ndarray) -> None:
    """Pixels of one image into ``out`` [H, W, C]; grey becomes RGB where C is 3."""
    try:
        with Image.open(io.BytesIO(read(path))) as image:
            found, expected = f"{image.height}x{image.width}", f"{out.shape[0]}x{out.shape[1]}"
            if found != expected:
                raise UserError(f"{path}: image of {found} among images of {expected}, expected one size")
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


def main() -> None:
    shape = tuple(map(int, sys.argv[1:4]))
    read = reader(sys.argv[4] if len(sys.argv) > 4 else None)
    answer = sys.stdout.buffer
    for line in sys.stdin.buffer:
        paths = json.loads(line)
        pixels = np.empty((len(paths), *shape), dtype=np.uint8)
        try:
            for path, out in zip(paths, pixels):
                decode(read, path, out)
            answer.write(b"null\n" + pixels.tobytes())
        except UserError as error:
            answer.write(json.dumps(str(error)).encode() + b"\n")
        answer.flush()


if __name__ == "__main__":
    main()
