"""What a method is: maths on flat vectors, and a declaration of what moves and what is kept.

``s`` holds the vectors of the server, each [d]; ``c`` those of C clients that train together, each [C, d]
(``c.steps`` [C, 1] is K_i); ``r`` is the round. Every name is the paper's.

A round calls, in this order: ``begin`` on the clients, K times the hooks ``before_clip`` and ``direction`` of the local
step (``step.py``), ``finish`` on the clients, ``server`` on the root with the means, and ``derive`` on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..config import Config


class RebindError(TypeError):
    """A method bound the name of a vector to another tensor."""


class Vectors:
    """Named flat tensors, read as attributes: ``s.x``, ``s.g_a``.

    They are updated in place, ``c.m.mul_(0.9)`` or ``c.m *= 0.9``. ``c.m = 0.9 * c.m`` is refused: the name would refer
    to another tensor, while the buffers, and steps that were captured for a GPU, still had the old one.
    """

    def __init__(self, **tensors: Tensor | None) -> None:
        vars(self).update(tensors)

    def __setattr__(self, name: str, value: Tensor | None) -> None:
        if vars(self).setdefault(name, value) is not value:
            raise RebindError(f"{name} = ... does not update the vector {name}: write in place, {name}.copy_(...)")

    if TYPE_CHECKING:  # a method's own vectors have the names that it declares

        def __getattr__(self, name: str) -> Tensor: ...


class ClientVectors(Vectors):
    """Vectors of C clients, stacked: ``c.x`` and a method's own, [C, d] each."""

    x: Tensor
    g: Tensor  # gradients of the current batches, in the type that products are computed in
    steps: Tensor  # K_i, [C, 1]
    compute_copy: Tensor | None  # x in the type that products are computed in, where that is another


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
    derived: tuple[str, ...] = ()  # server vectors that every rank computes from successive x
    private: tuple[str, ...] = ()  # server vectors that never leave the root
    up: tuple[str, ...] = ("offset",)  # summed over the participants
    slots: tuple[str, ...] = ()  # per client, for one round
    client_state: tuple[str, ...] = ()  # per client, across rounds; stays on the client's rank
    paper_units: int = 1  # what the paper charges a participant and round, in vectors
    # Whether the step of a parameter without a gradient depends on that parameter alone. It does not where
    # ``before_clip`` makes its gradient non-zero, as the clip then scales it by the norm of all the others.
    elementwise: bool = True

    def __init_subclass__(cls) -> None:
        declared = any("elementwise" in vars(k) for k in cls.__mro__ if k not in (Algorithm, object))
        if cls.before_clip is not Algorithm.before_clip and not declared:
            raise TypeError(
                f"{cls.__name__} overrides before_clip and must declare elementwise: False, or True if it leaves "
                "parameters without a gradient at zero"
            )

    def __init__(self, config: Config):
        self.config = config
        self.alpha, self.eta_g = config.alpha, config.server_lr
        self.beta1, self.beta2 = config.beta1, config.beta2

    @property
    def shares_gradient_free(self) -> bool:
        """Whether gradient-free parameters are equal on all clients that take the same number of steps."""
        return self.elementwise and not self.client_state

    def start(self, s: Vectors) -> None:
        """Values at t = 0 of server vectors other than x; they arrive as zeros."""

    def begin(self, c: ClientVectors, s: Vectors) -> None:
        """The clients' state at the start of a round."""
        c.x.copy_(s.x.expand_as(c.x))

    def before_clip(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        """The gradient that is clipped; may overwrite ``g``."""
        return g

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        """The step direction from the clipped gradient; may overwrite ``g``."""
        return g

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        """What each client sends, [C, d] for every name in ``up``; may overwrite the clients' state."""
        return {"offset": c.x.neg_().add_(s.x)}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        """The server's step, in place."""
        s.x.sub_(mean["offset"], alpha=self.eta_g)

    def derive(self, s: Vectors, before: Tensor, r: Round) -> None:
        """The ``derived`` vectors, on every rank once the new s.x has arrived; ``before`` is x^t."""
