"""Objects in users' own code, found by name, and errors of that code in one line."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError


@contextmanager
def users_code(what: str, expected: str) -> Iterator[None]:
    """What a user's code raises, in one line that names the place in it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = (str(error).strip().splitlines() or ["no message"])[0]
        raise UserError(f"{what}: {type(error).__name__}: {message}{_place(error)}; expected {expected}") from error


def _place(error: Exception) -> str:
    """`` (model.py, line 3)``: the innermost line outside this package and torch."""
    torch = sys.modules.get("torch")
    inside = tuple(str(Path(file).parent) for file in (__file__, torch.__file__ if torch else None) if file)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_file()]
    own = [f for f in frames if not f.filename.startswith((*inside, importlib.__file__))]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def load_object(what: str, name: str, expected: str) -> Any:
    """``package.module:object``, also from the working directory, or ``path/file.py:object``."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise UserError(f"{what}: expected {expected}")
    with users_code(what, expected):
        module = _file(place) if place.endswith(".py") else _module(place)
        return getattr(module, attribute)


def _module(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def _file(path: str) -> Any:
    """The module in a file, once for each content."""
    code = Path(path).read_bytes()
    name = f"fedlada_own_{Path(path).stem}_{hashlib.sha256(os.path.abspath(path).encode() + code).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
