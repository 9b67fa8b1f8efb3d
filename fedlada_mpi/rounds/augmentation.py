"""A user's own augmentation: a function of a client's batch, as a model gets it; what it draws is seeded.

    def rotated(images):                       # [N, channels, rows, columns], normalised
        turns = torch.randint(4, (len(images), 1, 1, 1))
        return torch.where(turns == 1, images.rot90(1, (2, 3)), images)

Its random numbers are functions of the run's seed, the round, the client and the step, like those of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models.form import Form, Stored, each
from ..support.errors import UserError
from ..support.randomness import Draws, mix
from ..support.user_code import load_object, users_code

PLACE = 0x5EED  # in the sequence of a step's keys: other numbers than those of layers
EXPECTED = "a function of a batch, package.module:function or path/file.py:function"


class Augmentation:
    """The function that ``--augment`` names, on the batches of C clients [C, N, ...]."""

    def __init__(self, name: str, form: Form):
        self.name, self.form = name, form
        self.function: Callable[[Any], Any] = load_object("--augment", name, EXPECTED)
        if not callable(self.function):
            raise UserError(f"--augment {name}: got {type(self.function).__name__}, expected {EXPECTED}")
        self._try()

    def __call__(self, batches: Stored, keys: Tensor) -> Stored:
        """``keys`` [C] are those of the step."""
        own = mix(keys + PLACE)
        clients = [self._of_one(each(batches, lambda v, c=client: v[c]), own[client]) for client in range(len(keys))]
        if isinstance(batches, Tensor):
            return torch.stack(clients)  # type: ignore[arg-type]
        return {name: torch.stack([client[name] for client in clients]) for name in batches}  # type: ignore[index]

    def _of_one(self, batch: Stored, key: Tensor) -> Stored:
        (arguments, named), what = self.form.seen(batch), f"--augment {self.name}"
        with Draws(key.reshape(1), stacked=False, what=what), users_code(what, EXPECTED):
            found = self.function(named or arguments[0])
        given = named or {"": arguments[0]}
        changed = found if isinstance(found, dict) else {"": found}
        if [*changed] != [*given]:
            got, expected = (", ".join(names) or "a tensor" for names in (changed, given))
            raise UserError(f"{what}: got {got}, expected {expected}, as it was given")
        for name, before in given.items():
            after = changed.get(name)
            if not isinstance(after, Tensor) or after.shape != before.shape or after.dtype != before.dtype:
                got = f"{after.dtype} {list(after.shape)}" if isinstance(after, Tensor) else type(after).__name__
                raise UserError(f"{what}: got {got}, expected {before.dtype} {list(before.shape)}, as it was given")
        return found.permute(0, 2, 3, 1) if self.form.image else found

    def _try(self) -> None:
        """On two batches, before a run writes anything."""
        batches = self.form.random(2, 3, draw=torch.Generator().manual_seed(0))
        keys = torch.arange(2)
        first, again = (self(each(batches, Tensor.clone), keys) for _ in range(2))
        if not all(value.isfinite().all() for value in _tensors(first)):
            raise UserError(f"--augment {self.name}: its result has numbers that are not finite")
        pairs = zip(_tensors(first), _tensors(again), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            raise UserError(
                f"--augment {self.name}: two calls on the same batch differ; draw random numbers with torch, not with "
                "random or numpy, and keep no state"
            )


def _tensors(of: Stored) -> list[Tensor]:
    return [of] if isinstance(of, Tensor) else list(of.values())
