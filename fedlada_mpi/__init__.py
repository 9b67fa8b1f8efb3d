"""FedLADA and its baselines, cross-silo, over MPI.

From Python: ``train`` a run, ``load`` one from its directory, ``tune`` settings; ``docs/python.md`` has examples.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from .support.version import __version__

if TYPE_CHECKING:
    from .algorithms import Algorithm, hyper
    from .api import train
    from .data.arrays import Data
    from .support.errors import DivergedError, UserError
    from .tasks import Metric, Task, summed, whole
    from .trained import Model, Run, load
    from .tune import tune

# Before torch loads OpenMP: on a machine that others use too, threads that spin while they wait slow each other down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__all__ = [
    "Algorithm",
    "Data",
    "DivergedError",
    "Metric",
    "Model",
    "Run",
    "Task",
    "UserError",
    "__version__",
    "hyper",
    "load",
    "summed",
    "train",
    "tune",
    "whole",
]

_HOMES = {
    "Algorithm": "algorithms",
    "hyper": "algorithms",
    "train": "api",
    "tune": "tune",
    "Data": "data.arrays",
    "DivergedError": "support.errors",
    "UserError": "support.errors",
    "Metric": "tasks",
    "Task": "tasks",
    "summed": "tasks",
    "whole": "tasks",
    "Model": "trained",
    "Run": "trained",
    "load": "trained",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: commands must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
