"""Reading files and paths that users give: reading never blocks, as it would on a FIFO, and errors are one line."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from .errors import UserError, printable, shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME_BYTES = 255  # in one part of a path, on every common file system
PATH_BYTES = 4096 - 256  # in a whole path on Linux, less what a run appends


def check_path(text: str, what: str) -> None:
    """Refuse what cannot be the name of a file or a directory; ``what`` is the flag that gave it."""
    try:
        parts, whole = [*map(os.fsencode, Path(text).parts)], os.fsencode(os.path.abspath(text))
    except UnicodeEncodeError:
        raise UserError(f"{what}: got {shortened(text)}, expected a path, which is text") from None
    if b"\0" in whole:
        raise UserError(f"{what}: got {shortened(text)}, expected a path, which has no NUL characters")
    longest = max(map(len, parts), default=0)
    for got, most, unit in ((longest, NAME_BYTES, "a name"), (len(whole), PATH_BYTES, "a path")):
        if got > most:
            raise UserError(f"{what}: got {shortened(text)}, {unit} of {got} bytes, expected at most {most}")


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; raises OSError for anything else (a FIFO would wait for a writer)."""
    require_regular(path)
    return path.read_bytes()


def require_regular(path: Path) -> None:
    """Raise OSError unless the path leads to a regular file."""
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:  # a NUL character
        raise OSError(str(error)) from None
    if not stat.S_ISREG(mode):
        raise OSError("it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file")


def reason(error: OSError) -> str:
    """Why a file could not be read, without its name."""
    return error.strerror or str(error)


def parse_json(content: bytes | str, once: bool = False) -> Any:
    """As ``json.loads``; raises ValueError also where values are nested too deeply, and with ``once`` where a name is
    there twice."""
    try:
        return json.loads(content, object_pairs_hook=_once if once else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shortened(name)} is there twice")
        found[name] = value
    return found


def read_json(path: Path, once: bool = False) -> Any:
    """A JSON file in UTF-8; raises OSError or ValueError, as ``parse_json`` does."""
    return parse_json(read_bytes(path).decode("utf-8-sig"), once)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file, with or without a byte order mark; raises OSError or ValueError."""
    try:
        return tomllib.loads(read_bytes(path).decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def figure_text(text: str, length: int = 60) -> str:
    """Text for a figure: printable, cut where it is long, with dollar signs (matplotlib's formulas) escaped."""
    text = printable(text)
    return (text if len(text) <= length else text[: length - 1] + "…").replace("$", r"\$")
