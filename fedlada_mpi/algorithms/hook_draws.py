"""The random numbers that a method's hooks draw with torch.

In the hooks of a client they are functions of (seed, round, client) and, in those of a local step, of the step; in
those of the server of (seed, round), the same on every rank. So they do not depend on ranks, on which clients train
together, or on a resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..support import rng
from ..support.randomness import Draws, mix
from .base import Algorithm

# Each has numbers of its own; "step" is before_clip, direction and after_decay, one after the other.
CLIENT = ("enter", "begin", "point", "step", "finish")
SERVER = ("start", "server", "derive")


class HookDraws(Draws):
    """A generator that a method brings itself is used as it is: its trial shows whether it can be repeated.

    Elements between parameters stay zero, so that norms and means are those of the model; ``real`` [d] is zero there.
    """

    example = ": a row for each client, such as torch.randn_like(c.x)"

    def __init__(self, keys: Tensor, stacked: bool, what: str, real: Tensor | None = None):
        super().__init__(keys, stacked, what)
        self.real = real

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (kwargs or {}).get("generator") is not None:
            return func(*args, **(kwargs or {}))
        before = self.count
        drawn = super().__torch_dispatch__(func, types, args, kwargs)
        if self.real is not None and self.count > before and isinstance(drawn, Tensor):
            return drawn.mul_(self.real) if drawn.shape[-1:] == self.real.shape else drawn
        return drawn


def client_keys(a: Algorithm, t: int, clients: np.ndarray) -> Tensor:
    """One key for each of ``clients`` in round t, [C]."""
    bits = [rng.bits(1, a.config.seed, rng.CLIENT_HOOKS, t, client) for client in clients.tolist()]
    return torch.from_numpy(np.concatenate(bits).view(np.int64))


def client_draws(
    a: Algorithm, hook: str, keys: Tensor, step_keys: Tensor | int = 0, real: Tensor | None = None
) -> AbstractContextManager[object]:
    """Around a hook of the clients with ``keys`` [C]; ``step_keys`` [C] differ from step to step."""
    if not a.traits.draws:
        return nullcontext()
    return HookDraws(mix(mix(keys + CLIENT.index(hook)) + step_keys), stacked=True, what=_what(a, hook), real=real)


def server_draws(a: Algorithm, hook: str, t: int, real: Tensor | None = None) -> AbstractContextManager[object]:
    """Around a hook of the server in round t."""
    if not a.traits.draws:
        return nullcontext()
    bits = rng.bits(len(SERVER), a.config.seed, rng.SERVER_HOOKS, t).view(np.int64)
    return HookDraws(torch.from_numpy(bits)[[SERVER.index(hook)]], stacked=False, what=_what(a, hook), real=real)


def _what(a: Algorithm, hook: str) -> str:
    return f"--algorithm {a.config.algorithm}: {hook}"
