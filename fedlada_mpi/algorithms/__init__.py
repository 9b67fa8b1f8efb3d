"""The federated methods: the built-in ones by name, a user's own as ``package.module:Class`` or ``path/file.py:Class``.

A new built-in method is a new file here with a class that has a ``name``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from .. import settings
from ..settings import SETTINGS, Config, Resolved, Setting, coerce
from ..support.errors import UserError
from ..support.suggestions import did_you_mean
from ..support.user_code import load_object, users_code
from .base import Algorithm, ClientVectors, Round, Tensor, Vectors, hyper

__all__ = ["Algorithm", "ClientVectors", "Round", "Tensor", "Vectors", "create", "find", "hyper", "names", "resolve"]

NO_METHODS = ("declarations", "dry_run", "hook_draws", "step", "trial")  # modules that are for all methods


@cache
def _built_in() -> dict[str, type[Algorithm]]:
    for module in pkgutil.iter_modules(__path__):
        if module.name not in NO_METHODS:
            importlib.import_module(f"{__name__}.{module.name}")

    def below(cls: type[Algorithm]) -> Iterator[type[Algorithm]]:
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    own = (cls for cls in below(Algorithm) if cls.__module__.startswith(__name__) and "name" in vars(cls))
    return {cls.name: cls for cls in sorted(own, key=lambda cls: (cls.year, cls.title().lower()))}


def names() -> tuple[str, ...]:
    """The built-in methods, by the year of their publication."""
    return tuple(_built_in())


def built_in_hypers() -> dict[str, Setting]:
    """The settings that any of the built-in methods has."""
    return {name: setting for cls in _built_in().values() for name, setting in cls.hypers.items()}


def recorded_hypers(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A method's own settings in the record of a run, without running a user's code."""
    if name in _built_in():
        settings = _built_in()[name].hypers
        return {key: coerce(setting, record.get(key, setting.default)) for key, setting in settings.items()}
    return {key: v for key, v in record.items() if key not in SETTINGS and isinstance(v, (bool, int, float, str))}


def find(name: str) -> type[Algorithm]:
    """The class of a method."""
    known = _built_in()
    if name in known:
        return known[name]
    if ":" not in name:
        expected = f"{', '.join(known)}, package.module:Class or path/file.py:Class"
        raise UserError(f"--algorithm: got {name!r}, expected one of {expected}{did_you_mean(name, known)}")
    cls = load_object("--algorithm", name, "package.module:Class or path/file.py:Class")
    if not isinstance(cls, type) or not issubclass(cls, Algorithm):
        raise UserError(f"--algorithm {name}: expected a subclass of fedlada_mpi.algorithms.Algorithm")
    return cls


def settings_of(algorithm: str) -> dict[str, Setting]:
    """All settings of a run with this method."""
    return {**SETTINGS, **find(algorithm).hypers}


def resolve(
    flags: Mapping[str, Any],
    file: Mapping[str, Any] | None = None,
    dataset_kind: str | None = None,
    shards: Mapping[str, Any] | None = None,
    recorded: bool = False,
    data_known: bool = True,
) -> Resolved:
    """The settings of a run, with those of its method (``settings/resolve.py``).

    >>> resolve({"algorithm": "fedavg", "lr": 0.05}).sources["lr"]
    'flag'
    """
    name = settings.chosen("algorithm", flags, file)
    return settings.resolve(
        name, find(name), flags, file, dataset_kind, shards, recorded, built_in_hypers(), data_known
    )


def create(config: Config, tensors: Sequence[Sequence[slice]] = ((slice(None),),)) -> Algorithm:
    """The method that the settings name; ``tensors``: where each parameter tensor is in a flat vector."""
    cls = find(config.algorithm)
    if ":" not in config.algorithm:
        return cls(config, tensors)
    from .dry_run import construct, dry_run

    what = f"--algorithm {config.algorithm}"
    with users_code(what, "a method as in docs/methods.md"):
        try:
            traits = dry_run(construct(cls, config, tensors), tensors)
        except UserError as error:
            raise UserError(f"{what}: {error}") from None
        method = construct(cls, config, tensors)
    method.traits = traits
    return method
