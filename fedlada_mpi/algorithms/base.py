"""What a method is: maths on flat vectors, and a declaration of everything that a run must know about it.

``s`` holds the vectors of the server, each [d]; ``c`` those of C clients that train together, each [C, d] (``c.steps``
[C, 1] is K_i); ``r`` is the round. Every name is the paper's.

A round calls, in this order: ``begin`` on the clients, K times the hooks ``point``, ``before_clip``, ``direction`` and
``after_decay`` of the local step (``step.py``), ``finish`` on the clients, ``server`` on the root with the means, and
``derive`` on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ..settings import Config, Configurable, hyper
from ..support import rng
from ..support.errors import UserError
from ..support.suggestions import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any  # settings are read without waiting for torch

__all__ = ["Algorithm", "ClientVectors", "Round", "Tensor", "Vectors", "hyper"]


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

    _kind, _declared_in = "s", "down or derived, or for server alone in private"

    def __getattr__(self, name: str) -> Tensor:
        """Where there is no vector of that name."""
        if name.startswith("__"):  # Python asks for these
            raise AttributeError(name)
        raise AttributeError(
            f"{self._kind}.{name} is none of the vectors here, which are {', '.join(vars(self))}"
            f"{did_you_mean(name, vars(self))}: declare it in {self._where(name)}"
        )

    def _where(self, name: str) -> str:
        return self._declared_in


class ClientVectors(Vectors):
    """Vectors of C clients, stacked: ``c.x`` and a method's own, [C, d] each."""

    _kind, _declared_in = "c", "slots or client_state"

    x: Tensor
    g: Tensor  # gradients of the current batches, in the type that products are computed in
    steps: Tensor  # K_i, [C, 1]
    k: Tensor  # index of the local step from 0, [C, 1], where ``step_index``
    compute_copy: Tensor | None  # x in the type that products are computed in, where that is another
    g1: Tensor  # gradients of the same batches at x, where ``gradients`` is 2
    full_g: Tensor  # gradients on all of a client's images at x^t, where ``full_gradient``

    def _where(self, name: str) -> str:
        asked = {"k": "step_index = True", "g1": "gradients = 2", "full_g": "full_gradient = True"}
        return f"the class as {asked[name]}" if name in asked else super()._where(name)


def rows(c: ClientVectors, which: slice) -> ClientVectors:
    """The vectors of some of the clients."""
    return ClientVectors(**{name: None if v is None else v[which] for name, v in vars(c).items()})


@dataclass(frozen=True)
class Round:
    t: int  # 0-based
    lr: float  # eta_t, the local rate of this round
    steps: float  # K, the mean of K_i over the participants
    participants: float  # S; with --dp its expectation, as the number itself is secret
    clients: int  # m


@dataclass(frozen=True)
class Traits:
    """What a trial of a user's own method has found out about it."""

    draws: bool = False  # whether hooks draw random numbers
    notes: tuple[str, ...] = ()  # for the user, one line each


@dataclass(frozen=True)
class ClientPrivacy:
    """How ``--dp client`` takes a method."""

    refused: str = ""  # why it does not
    warning: str = ""  # what to expect of it
    fixed_steps: bool = False  # whether the server's maths uses K, which --local-steps makes public
    changes: Mapping[str, str] = field(default_factory=dict)  # of s.NAME, sent so, next to those of ``change_of``


NOISY_MOMENTS = "the noise of every coordinate is far above its second moment: fedcm or fedadam will do better"


class Algorithm(Configurable):
    """FedAvg; the other methods state what they do differently."""

    label: ClassVar[str] = ""  # in reports; without one, the name of the class
    colour: ClassVar[str] = ""  # of a built-in method, in reports; without one, the next free one
    year: ClassVar[int] = 9999  # of publication; reports list methods in this order

    down: tuple[str, ...] = ("x",)  # server vectors that every rank receives each round
    derived: tuple[str, ...] = ()  # server vectors that every rank computes from successive x
    private: tuple[str, ...] = ()  # server vectors that never leave the root
    up: tuple[str, ...] = ("offset",)  # averaged over the participants, weighted as by --weighting
    uniform: tuple[str, ...] = ()  # those of ``up`` and ``scalars`` with equal weights, whatever --weighting says
    # Those of ``up`` that are never negative and differ little from a vector that every rank has, such as second
    # moments: with --secure and --dp, their change is sent.
    change_of: Mapping[str, str] = {}
    scalars: tuple[str, ...] = ()  # numbers that go up with the vectors
    slots: tuple[str, ...] = ()  # per client, for one round
    client_state: tuple[str, ...] = ()  # per client, across rounds; stays on the client's rank
    paper_units: int = 1  # what the paper charges a participant and round, in vectors

    gradients: int = 1  # per local step; 2: the first is taken at x, as ``c.g1``
    step_index: bool = False  # whether the hooks of the local step use ``c.k``
    full_gradient: bool = False  # whether ``finish`` uses ``c.full_g``
    fusable: bool = True  # whether a GPU kernel may be made of the local step; otherwise it runs as written
    traits: Traits = Traits()
    dp: ClassVar[ClientPrivacy] = ClientPrivacy()
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "": dict(lr=0.1, weight_decay=1e-3, decay_mode="l2", server_lr=1.0)
    }

    def __init__(self, config: Config, tensors: Sequence[Sequence[slice]] = ((slice(None),),)):
        """``tensors``: where each parameter tensor is in a flat vector, for methods with norms of single ones."""
        self.config, self.tensors = config, tensors
        self.eta_g = config.server_lr
        # alpha * (d + lambda * x) + (1 - alpha) * g_a is what the method adds up with a decay of alpha * lambda.
        self.decay = config.weight_decay * (config.hyper["alpha"] if config.decay_mode == "inside" else 1)
        self.moves_point = type(self).point is not Algorithm.point
        for name in self.hypers:
            setattr(self, name, config.hyper[name])

    @classmethod
    def title(cls) -> str:
        return cls.label or cls.__name__

    @classmethod
    def check_dp(cls, algorithm: str, values: Mapping[str, Any]) -> None:
        if cls.dp.refused:
            raise UserError(f"--dp client: got --algorithm {algorithm}, expected another: {cls.dp.refused}")
        # What a user's own method does with r.steps is not known.
        if (cls.dp.fixed_steps or ":" in algorithm) and not values["local_steps"]:
            raise UserError(
                f"--dp client: --algorithm {algorithm} needs --local-steps K, such as 10: a number of steps that "
                "follows from clients' sizes is their data"
            )

    def dp_scales(self, r: Round) -> Mapping[str, float]:
        """Factors by which what a client sends is comparable to its offset, where they are not 1: all share a clip."""
        return {}

    def dp_scalars(self, r: Round) -> Mapping[str, float]:
        """The means of those ``scalars`` that follow from the round, and need not be sent."""
        return {}

    def dp_least(self) -> Mapping[str, float]:
        """The least value of noisy means that must not be negative."""
        return {}

    def coin(self, t: int) -> float:
        """A number in [0, 1) that all ranks draw for round t."""
        return float(rng.bits(1, self.config.seed, rng.COIN, t)[0] >> 11) * 2.0**-53

    def communicates(self, t: int) -> bool:
        """Whether round t ends with sums, a server step and new vectors for all; otherwise clients only train."""
        return True

    def start(self, s: Vectors) -> None:
        """Values at t = 0 of server vectors other than x; they arrive as zeros."""

    def enter(self, c: ClientVectors, s: Vectors) -> None:
        """``client_state`` of clients that take part for the first time; it arrives as zeros."""

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        """The clients' vectors at the start of a round."""
        c.x.copy_(s.x.expand_as(c.x))

    def point(self, c: ClientVectors, s: Vectors, lr: Tensor) -> Tensor | None:
        """Where the gradient of the step is taken; None for ``c.x``."""
        return None

    def before_clip(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        """The gradient that is clipped; may overwrite ``g``."""
        return g

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        """The step direction from the clipped gradient; may overwrite ``g``."""
        return g

    def after_decay(self, c: ClientVectors, s: Vectors, d: Tensor) -> Tensor:
        """The direction, decoupled decay included, that is multiplied by the rate; may overwrite ``d``."""
        return d

    def decaying(self, x: Tensor, s: Vectors) -> Tensor:
        """``x`` where it decays, zero elsewhere (``--decay-on``)."""
        return x * s.decays if self.config.decay_on == "weights" else x

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        """What each client sends, [C, d] for every name in ``up`` and [C, 1] for every one in ``scalars``.

        It may overwrite the clients' vectors.
        """
        import torch  # here, as settings are read without it

        return {"offset": torch.sub(s.x, c.x, out=c.x)}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        """The server's step, in place."""
        s.x.sub_(mean["offset"], alpha=self.eta_g)

    def derive(self, s: Vectors, x_previous: Tensor, r: Round) -> None:
        """The ``derived`` vectors, on every rank once the new s.x has arrived; ``x_previous`` is x^t."""
