"""Loading objects from users' code by name, and reporting errors in that code in one line."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from .errors import UserError, first_line, shortened
from .inputs import check_path, read_bytes

# Before the name of a model that is not a user's code: of one of torchvision's, or of a folder in transformers' format.
TORCHVISION, HUGGING_FACE = "torchvision:", "hf:"
_LIBRARIES = (
    Path(__file__).resolve().parents[1],
    *(Path(os.path.realpath(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib")),
)


class Given(str):
    """The name under which an object that was passed from Python stands in the settings; ``object`` is the object."""

    object: Any

    def __new__(cls, given: Any) -> Given:
        named = given if hasattr(given, "__qualname__") else type(given)
        name = super().__new__(cls, f"{named.__module__}:{named.__qualname__}")
        name.object = given
        return name


def is_own(name: str) -> bool:
    """Whether a setting names code of a user, not a built-in method or model."""
    return ":" in name and not name.startswith((TORCHVISION, HUGGING_FACE))


def is_library(file: str | Path) -> bool:
    """Whether a file belongs to Python, to an installed package or to this one."""
    path = Path(os.path.realpath(file))
    return is_installed(path) or any(library in path.parents for library in _LIBRARIES)


def is_installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def is_standard(file: str | Path) -> bool:
    """Whether a file belongs to Python's own library."""
    path = Path(os.path.realpath(file))
    return not is_installed(path) and any(library in path.parents for library in _LIBRARIES[1:])


class _Directory:
    """The working directory of this process, while users' code is running in any of its threads."""

    lock = threading.Lock()
    blocks = 0
    path: str | None = None  # None if it is gone


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


@contextmanager
def same_directory() -> Iterator[None]:
    """Go back to the working directory if the block leaves it: relative paths of a run, as ``out``, mean that one."""
    with _Directory.lock:
        if not _Directory.blocks:
            _Directory.path = _working_directory()
        _Directory.blocks += 1
    try:
        yield
    finally:
        with _Directory.lock:
            _Directory.blocks -= 1
            # Not while another thread is in such a block: it may be where that one has gone.
            if not _Directory.blocks and _Directory.path not in (None, _working_directory()):
                with suppress(OSError):
                    os.chdir(str(_Directory.path))


@contextmanager
def users_code(what: str, expected: str) -> Iterator[None]:
    """Raise what a user's code raises, ``sys.exit`` included, as a UserError that names the line in it."""
    try:
        with same_directory():
            yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        message = first_line(error) if str(error).strip() else "no message"
        place = _place(error) or f"; expected {expected}"
        raise UserError(f"{what}: {type(error).__name__}: {message}{place}") from error


def _place(error: BaseException) -> str:
    """`` (model.py, line 3: its text)``: the innermost line that is in the user's code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_file()]
    own = [f for f in frames if not is_library(f.filename)]
    return f" ({own[-1].filename}, line {own[-1].lineno}: {own[-1].line})" if own else ""


def load_object(flag: str, name: str, expected: str) -> Any:
    """``package.module:object``, also from the working directory, or ``path/file.py:object``."""
    if isinstance(name, Given):
        return name.object
    place, _, attribute = name.rpartition(":")
    in_file = place.endswith(".py")
    parts = attribute.split(".") if in_file else (*place.split("."), *attribute.split("."))
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"{flag}: got {shortened(name)}, expected {expected}")
    if in_file:
        check_path(place, flag)
    with users_code(f"{flag} {name}", expected):
        return attrgetter(attribute)(_file(place) if in_file else _module(place))


@contextmanager
def working_directory_first() -> Iterator[None]:
    """Modules are looked for in the working directory, too; what an imported one adds to the path stays there."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(here)


def _module(name: str) -> Any:
    with working_directory_first():
        return importlib.import_module(name)


_loading = threading.RLock()  # another thread would take a module whose code is still running


def _file(path: str) -> Any:
    """The module in a file; loaded again only if the file has changed. What was read is run, not a cached copy."""
    code = read_bytes(Path(path))
    name = f"fedlada_own_{Path(path).stem}_{hashlib.sha256(os.path.abspath(path).encode() + code).hexdigest()[:12]}"
    with _loading:
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            try:
                exec(compile(code, path, "exec", dont_inherit=True), vars(module))
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]
