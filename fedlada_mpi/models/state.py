"""What a module keeps besides its parameters and buffers: attributes of layers and classes, and globals of its files.

Where a forward pass changes any of it at every call, such as a counter, results may depend on the number of calls.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OF_TORCH = vars(nn.Module()).keys() - {"training"}


def of(module: nn.Module) -> dict[str, Any]:
    """Numbers, texts, tensors and containers of these, by name."""
    scopes: dict[str, Mapping[str, Any]] = {}
    for name, layer in module.named_modules():
        scopes[f"{name}." if name else ""] = {key: v for key, v in vars(layer).items() if key not in _OF_TORCH}
        for kind in type(layer).__mro__:
            if kind.__module__.partition(".")[0] not in ("torch", "builtins"):
                scopes[f"{kind.__qualname__}."] = vars(kind)
                scopes[f"{kind.__module__}."] = vars(sys.modules.get(kind.__module__, kind))
    return {
        prefix + key: copied
        for prefix, scope in scopes.items()
        for key, value in [*scope.items()]
        if not key.startswith("__") and (copied := _copy(value)) is not _OTHER
    }


def changed_every_time(states: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs between each of the states and the one before it."""
    pairs = [*pairwise(states)]
    return [name for name in states[-1] if not any(_equal(a.get(name), b.get(name)) for a, b in pairs)]


_OTHER = object()


def _copy(value: Any, depth: int = 3) -> Any:
    """Of a value that is compared; ``_OTHER`` for anything else, such as functions and layers."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy() if value.dtype != object else _OTHER
    if isinstance(value, Mapping) and depth:
        return {key: _copy(item, depth - 1) for key, item in [*value.items()]}
    if isinstance(value, (list, tuple, deque)) and depth:
        return [_copy(item, depth - 1) for item in [*value]]
    return _OTHER


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return same and (torch.equal(a, b) or bool(torch.isclose(a, b, equal_nan=True).all()))
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and bool(((a == b) | (a != a)).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b or a != a)
