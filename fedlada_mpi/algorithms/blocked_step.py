"""Local training on a CPU, one block of elements after another, so that what a block needs stays in its caches.

The same numbers to the bit: hooks of built-in methods act on every element by itself, unless they say otherwise
(``fusable``), and the norm of the clip is that of the whole vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .base import Algorithm, ClientVectors, Round, Vectors
from .step import clip_factor, gradient, local_step, move

BLOCK = 3 << 14  # elements of all clients; with the vectors of a method such as FedLADA, about a megabyte
ALIGN = 64  # elements, as in ``models/layout.py``: no block ends within a vector instruction
# A norm that is computed in another order and is below this part of the clip is below the clip.
CERTAIN = 0.9


def is_elementwise(algorithm: Algorithm) -> bool:
    """Whether the hooks of local training are known to treat every element alike; a user's own may use norms."""
    return algorithm.fusable and ":" not in algorithm.config.algorithm and not algorithm.traits.draws


@dataclass
class _Blocks:
    """The vectors of a step, whole and in blocks; views."""

    c: ClientVectors
    s: Vectors

    def __post_init__(self) -> None:
        clients, size = self.c.x.shape
        self.width = max(1, BLOCK // clients // ALIGN) * ALIGN
        count = -(-size // self.width)
        of_clients, of_server = _blocks(self.c, self.width, count), _blocks(self.s, self.width, count)
        self.parts = list(zip(of_clients, of_server, strict=True))


_V = TypeVar("_V", bound=Vectors)


def _blocks(vectors: _V, width: int, count: int) -> list[_V]:
    """Blocks of all vectors; numbers of clients, such as K_i, as they are."""
    kind = type(vectors)
    pieces = {
        name: [vector] * count if vector is None or vector.shape[-1] == 1 else vector.split(width, -1)
        for name, vector in vars(vectors).items()
    }
    return [kind(**dict(zip(pieces, block, strict=True))) for block in zip(*pieces.values(), strict=True)]


def begin(algorithm: Algorithm, c: ClientVectors, s: Vectors, r: Round) -> None:
    """``algorithm.begin``: the server's vectors are read once for all clients."""
    if c.x.numel() <= BLOCK:
        algorithm.begin(c, s, r)
        return
    for parts in _Blocks(c, s).parts:
        algorithm.begin(*parts, r)


class BlockedStep:
    """``local_step``, in blocks where there are several."""

    def __init__(self) -> None:
        self.last: _Blocks | None = None  # of the vectors of the last step, which most others have, too

    def __call__(
        self, algorithm: Algorithm, c: ClientVectors, s: Vectors, lr: Tensor, gradient_free: bool, preserve_g: bool
    ) -> None:
        if gradient_free or c.x.numel() <= BLOCK:
            local_step(algorithm, c, s, lr, gradient_free, preserve_g)
            return
        if self.last is None or self.last.c is not c or self.last.s is not s:
            self.last = _Blocks(c, s)
        g = gradient(algorithm, c, s, gradient_free, preserve_g)
        clip = algorithm.config.clip
        factor = clip_factor(algorithm, g) if clip and not _certainly_below(g, CERTAIN * clip) else None
        for block, parts in zip(g.split(self.last.width, -1), self.last.parts, strict=True):
            move(algorithm, *parts, block, factor, lr)


def _certainly_below(g: Tensor, limit: float) -> bool:
    """Whether the norm of every row is; products are far faster than norms."""
    return all(float(torch.dot(row, row)) < limit**2 for row in g)
