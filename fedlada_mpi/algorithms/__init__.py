"""The federated methods, found by name. A new one is a new file here with a registered class."""

from __future__ import annotations

import importlib
import pkgutil

from ..config import Config
from .base import Algorithm, Round, Vectors

__all__ = ["Algorithm", "Round", "Vectors", "create", "names", "register"]

_METHODS: dict[str, type[Algorithm]] = {}


def register(name: str):
    def add(cls: type[Algorithm]) -> type[Algorithm]:
        cls.name = name
        _METHODS[name] = cls
        return cls

    return add


def names() -> tuple[str, ...]:
    return tuple(sorted(_METHODS))


def create(config: Config) -> Algorithm:
    return _METHODS[config.algorithm](config)


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
