"""FedNova (Wang et al., 2020): offsets are divided by what a client's own steps add up to.

client   SGD, or with --momentum r:   u = r * u + g,   d = u;   or with --mu:   d = g + mu * (x - x^t)
         a_i = K_i;   momentum: c = r * c + 1, a = a + c per step;   prox: a = (1 - eta_t * mu) * a + 1 per step
server   D = tau * mean(offset_i / a_i),   tau = mean(a_i), with prox mean(K_i), as in the authors' code
         x = x - eta_g * D;   with --server-momentum b:   u = b * u + D / eta_t,   x = x - eta_g * eta_t * u

The authors weight by the clients' sizes: --weighting size. Their code mixes the two recursions of a_i if momentum and
prox are both on; that is refused here.
"""

from collections.abc import Mapping
from typing import Any

from ..settings import Config
from ..support.errors import UserError
from .base import Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper


class FedNova(Algorithm):
    name, label, year = "fednova", "FedNova", 2020
    up = ("scaled",)
    scalars = ("tau",)
    dp = ClientPrivacy(fixed_steps=True)  # with which tau is public
    momentum: float = hyper(0.0, "r, local momentum, zero at the start of every round", least=0, below=1)
    mu: float = hyper(0.0, "weight of a proximal term", least=0)
    server_momentum: float = hyper(0.0, "decay of SlowMo's momentum on the server", least=0, below=1)

    def __init__(self, config: Config, *more: Any):
        super().__init__(config, *more)
        self.slots = ("u",) if self.momentum else ()
        self.private = ("u",) if self.server_momentum else ()

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> None:
        if values["momentum"] and values["mu"]:
            raise UserError("--momentum and --mu of fednova contradict each other: give one of them")

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        super().begin(c, s, r)
        if self.momentum:
            c.u.zero_()

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        if self.momentum:
            return g.copy_(c.u.mul_(self.momentum).add_(g))
        return g.add_(c.x - s.x, alpha=self.mu) if self.mu else g

    def normalizer(self, steps: Tensor, lr: float) -> Tensor:
        """a_i, in closed form; in double, as differences of nearly equal numbers are taken."""
        steps = steps.double()
        if self.momentum:
            q = self.momentum
            return (steps - q * (1 - q**steps) / (1 - q)) / (1 - q)
        if self.mu:
            q = lr * self.mu
            return (1 - (1 - q) ** steps) / q
        return steps

    def dp_scales(self, r: Round) -> Mapping[str, float]:
        return {"scaled": self._a(r)}

    def dp_scalars(self, r: Round) -> Mapping[str, float]:
        return {"tau": r.steps if self.mu else self._a(r)}

    def _a(self, r: Round) -> float:
        """a_i of K steps."""
        import torch

        return float(self.normalizer(torch.tensor(r.steps), r.lr))

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        a = self.normalizer(c.steps, r.lr)
        return {"scaled": super().finish(c, s, r)["offset"].div_(a), "tau": c.steps if self.mu else a}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        delta = mean["scaled"].mul_(mean["tau"].item())
        if self.server_momentum:
            delta = s.u.mul_(self.server_momentum).add_(delta, alpha=1 / r.lr) * r.lr
        s.x.sub_(delta, alpha=self.eta_g)
