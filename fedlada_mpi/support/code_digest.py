"""Digests of users' code, file by file and without running any of it: whether it is what a run began with.

Of ``path/file.py:Class`` the file counts, and of ``package.module:Class`` the module with its packages; then every
module that these import, and so on, where it lies in the same folder, in one below it or in the working directory.
Libraries (the standard one, site-packages, this package) do not count, unless the code named is in one: then the folder
that it lies in does. An object that was given from Python and cannot be imported by its name has a digest of its own
(``object_digest.py``).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from .inputs import read_bytes
from .object_digest import object_digest
from .user_code import Given, is_library, is_own, is_standard, working_directory_first
from .warning_filters import warning_filter

Files = dict[str, str]  # SHA-256 by name, relative to the folder of the code
Code = dict[str, Files]  # by the setting that names it
SETTINGS = ("algorithm", "model", "task", "augment")  # that may name users' code
MAIN = "__main__"  # a script or a notebook, which cannot be imported again


def of_settings(settings: Mapping[str, Any]) -> Code:
    """The code that settings name; built-in methods, models and tasks have none."""
    return {setting: of(name) for setting, name in named(settings).items()}


def named(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that name users' code."""
    given = {setting: settings[setting] for setting in SETTINGS if setting in settings}
    return {setting: name for setting, name in given.items() if isinstance(name, str) and is_own(name)}


def of(name: str) -> Files:
    """The files of ``package.module:object`` or ``path/file.py:object``; empty if there is no such file."""
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        file = Path(os.path.abspath(place))
        return _Search(file.parent, file.parent).digests([file]) if os.path.isfile(file) else {}
    if place != MAIN and not (isinstance(name, Given) and _object(place, attribute) is not name.object):
        return _of_module(place)
    found = name.object if isinstance(name, Given) else _object(place, attribute)
    # Bytecode is of one version of Python.
    key = f"{name} (Python {platform.python_version().rpartition('.')[0]})"
    return {} if found is None else {key: object_digest(found, _of_own_module)}


def changed(before: Code, now: Code) -> list[str]:
    """The names of what differs, in the settings that both know."""
    both = [(before[setting], now[setting]) for setting in before if setting in now]
    return sorted({name for old, new in both for name in old | new if old.get(name) != new.get(name)})


def only_given(name: str, files: Files) -> bool:
    """Whether ``name`` stood for an object that was given from Python, which its name does not lead to."""
    return any(key.startswith(f"{name} (") for key in files) and not name.startswith(f"{MAIN}:")


def summary(code: Code) -> str:
    """One short digest of it all, empty where there is no code."""
    return hashlib.sha256(repr(_sorted(code)).encode()).hexdigest()[:8] if any(code.values()) else ""


def _sorted(code: Code) -> list[Any]:
    return [(setting, sorted(files.items())) for setting, files in sorted(code.items())]


def _object(module: str, attribute: str) -> Any:
    """What the name stands for in this process, None where its module has not been imported."""
    try:
        return attrgetter(attribute)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _of_own_module(name: str) -> Files:
    """Those of a module that is no library's."""
    places = _places(name)
    return _of_module(name) if places and not any(is_library(place) for place in places) else {}


def _places(name: str) -> list[str]:
    """The file or the folders of a module's top package, which is not imported."""
    with working_directory_first():
        importlib.invalidate_caches()
        try:
            spec = importlib.util.find_spec(name.partition(".")[0])  # which imports nothing for a name without dots
        except (ImportError, ValueError):
            spec = None
    return list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []


def _of_module(name: str) -> Files:
    """Those of a module that may not have been imported, and is not."""
    places = _places(name)
    if any(is_standard(place) for place in places):
        return {name: ""}
    files: Files = {}
    for folder in {Path(place).parent for place in places}:
        start = list(_Search(folder, folder).find(name, [folder]))
        # A module of its own among the libraries is no package: its neighbours there are others' code.
        own = start[-1].parent if start and start[-1].parent != folder else folder / name
        files |= _Search(folder, own).digests(start) if start else {}
    return files or {name: ""}  # as of a built-in module


class _Search:
    """The files that code in ``folder`` imports; what is in ``package`` counts also in a library."""

    def __init__(self, folder: Path, package: Path):
        self.folder, self.package = folder, package
        self.roots = [folder, Path.cwd()]
        self.listings: dict[Path, set[str]] = {}

    def digests(self, start: list[Path]) -> Files:
        waiting, files = list(start), {}
        while waiting:
            file = waiting.pop()
            name = Path(os.path.relpath(file, self.folder)).as_posix()
            if name not in files:
                try:
                    content = read_bytes(file)
                except OSError:  # which its import will report
                    continue
                files[name] = hashlib.sha256(content).hexdigest()
                waiting += [found for found in self._imported(file, content) if self._counts(found)]
        return files

    def find(self, module: str, roots: list[Path]) -> Iterator[Path]:
        """What may be imported under a dotted name, its packages first; the first that fits is not enough, as the order
        of Python's path is another one."""
        for folder in roots:
            for part in module.split("."):
                yield from self._with_suffix(folder, part)
                if part not in self._names(folder):
                    break
                folder = folder / part
                yield from self._with_suffix(folder, "__init__")

    def _with_suffix(self, folder: Path, stem: str) -> Iterator[Path]:
        names = [f"{stem}{suffix}" for suffix in importlib.machinery.all_suffixes()]
        return (folder / name for name in names if name in self._names(folder))

    def _names(self, folder: Path) -> set[str]:
        if folder not in self.listings:
            try:
                self.listings[folder] = set(os.listdir(folder))
            except OSError:
                self.listings[folder] = set()
        return self.listings[folder]

    def _counts(self, file: Path) -> bool:
        return not is_library(file) or self.package in file.parents

    def _imported(self, file: Path, content: bytes) -> Iterator[Path]:
        try:
            with warning_filter("ignore"):  # on its syntax, which its import will repeat
                tree = ast.parse(content) if file.suffix == ".py" else ast.Module([], [])
        except (SyntaxError, ValueError, RecursionError):  # which its import will report
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self.find(alias.name, self.roots)
            elif isinstance(node, ast.ImportFrom):
                roots = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else self.roots
                for alias in node.names:
                    yield from self.find(".".join(filter(None, (node.module, alias.name))), roots)
