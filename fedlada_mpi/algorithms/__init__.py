"""The federated methods, found by name. A new one is a new file here with a registered class."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

from ..config import Config
from .base import Algorithm, ClientVectors, Round, Vectors

__all__ = ["Algorithm", "ClientVectors", "Round", "Vectors", "create", "names", "register"]

A = TypeVar("A", bound=Algorithm)
_METHODS: dict[str, type[Algorithm]] = {}


def register(name: str) -> Callable[[type[A]], type[A]]:
    """Class decorator: the class is the method ``name``."""

    def add(cls: type[A]) -> type[A]:
        cls.name = name
        _METHODS[name] = cls
        return cls

    return add


def names() -> tuple[str, ...]:
    return tuple(sorted(_METHODS))


def create(config: Config) -> Algorithm:
    """The method that the settings name."""
    return _METHODS[config.algorithm](config)


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
