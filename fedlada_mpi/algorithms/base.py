"""What a method is: elementwise maths on flat vectors, and a declaration of what moves.

``s`` holds the vectors of the server, each [d]; ``c`` those of C clients that train together, each [C, d]
(``c.steps`` [C, 1] is K_i); ``r`` is the round. Every name is the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor

from ..config import Config


class Vectors(SimpleNamespace):
    """Named tensors: ``s.x``, ``c.v_hat``."""


@dataclass(frozen=True)
class Round:
    t: int  # 0-based
    lr: float  # eta_t, the local rate of this round
    steps: float  # K, the mean of K_i over the participants
    participants: int  # S
    clients: int  # m


class Algorithm:
    name: str
    down: tuple[str, ...] = ("x",)  # server vectors that every rank receives each round
    derived: tuple[str, ...] = ()  # server vectors that every rank works out from successive x
    private: tuple[str, ...] = ()  # server vectors that never leave rank 0
    up: tuple[str, ...] = ("offset",)  # summed over the participants
    slots: tuple[str, ...] = ()  # per client, for one round
    kept: tuple[str, ...] = ()  # per client, across rounds; stay on the client's rank
    paper_units: int = 1  # what the paper charges a participant and round, in vectors

    def __init__(self, config: Config):
        self.config = config
        self.alpha, self.eta_g = config.alpha, config.server_lr
        self.beta1, self.beta2 = config.beta1, config.beta2

    @property
    def silent_alike(self) -> bool:
        """Whether elements that never have a gradient move alike on all clients with the same number of steps."""
        return not self.kept and type(self).amend is Algorithm.amend

    def start(self, s: Vectors) -> None:
        """Values at t = 0 of server vectors other than x, which come as zeros."""

    def begin(self, c: Vectors, s: Vectors) -> None:
        """The client's state at the start of a round."""
        c.x.copy_(s.x.expand_as(c.x))

    def amend(self, c: Vectors, s: Vectors, g: Tensor) -> Tensor:
        """The gradient before it is clipped; may overwrite ``g``."""
        return g

    def direction(self, c: Vectors, s: Vectors, g: Tensor) -> Tensor:
        """The step direction from the clipped gradient; may overwrite ``g``."""
        return g

    def finish(self, c: Vectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        """What each client sends, [C, d] for every name in ``up``; may overwrite the client's state."""
        return {"offset": c.x.neg_().add_(s.x)}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        """The server's step, in place."""
        s.x.sub_(mean["offset"], alpha=self.eta_g)

    def derive(self, s: Vectors, before: Tensor, r: Round) -> None:
        """``derived`` vectors on every rank, once the new s.x is there; ``before`` is x^t.

        x^{t+1} = x^t - eta_g * mean(offset), so g_a^{t+1} = mean(offset) / (K * eta_t) need not travel.
        """
        if "g_a" in self.derived:
            s.g_a.copy_(before).sub_(s.x).div_(self.eta_g * r.steps * r.lr)
