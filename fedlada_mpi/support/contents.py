"""The contents of objects, to see whether a user's code has changed them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

DEEPEST = 8  # objects within objects
PLAIN = (bool, int, float, complex, str, bytes, slice, type(None))


def contents(value: Any, depth: int = 0) -> Any:
    """Of numbers, tensors, arrays, generators, containers and objects of these; equal if they have not changed."""
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return ("tensor", tuple(value.shape), value.dtype, flat.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, torch.Generator):
        return ("generator", value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return contents(value.bit_generator.state, depth)
    if isinstance(value, (random.Random, np.random.RandomState)):
        state = value.getstate() if isinstance(value, random.Random) else value.get_state(legacy=False)
        return contents(state, depth)
    if isinstance(value, (type, FunctionType, MethodType, ModuleType)) or depth == DEEPEST:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {repr(key): contents(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [contents(each, depth + 1) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if hasattr(value, "__dict__"):
        return {name: contents(each, depth + 1) for name, each in vars(value).items()}
    return type(value).__name__


def global_generators() -> Any:
    """The states of Python's and numpy's global random numbers."""
    return random.getstate(), contents(np.random.get_state(legacy=False))  # noqa: NPY002  (users' code may use it)
