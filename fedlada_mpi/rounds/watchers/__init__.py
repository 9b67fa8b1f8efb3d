"""Watchers of a round, one file each; a new one is a new file here with a function ``create``."""

from __future__ import annotations

import importlib
import pkgutil

from ...rundir.history import History
from ..silo import Silo
from ..watcher import Watcher


def create(silo: Silo, history: History | None) -> list[Watcher]:
    """Those that the settings ask for, by the names of their files, on every rank; the root has a ``history``."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = (module.create(silo, history) for module in modules)
    return [watcher for watcher in found if watcher is not None]
