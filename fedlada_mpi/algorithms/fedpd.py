"""FedPD (Zhang et al., 2021), Oracle I: a primal-dual method in which all clients take part.

client   from its last x_i (--start-at warm, the paper) or from x0 (cold):   d = g + lam_i + (x - x0) / eta
         x_i = x,   lam_i = lam_i + (x_i - x0) / eta;   z_i = x_i + eta * lam_i
server   with probability 1 - p:   x = mean(z_i), the next x0 of all;   otherwise nobody talks, and x0 = z_i

The coin is the same on all ranks. lam_i starts at zero, x_i at x^0.
"""

from typing import Any

from ..settings import Config
from .base import Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper


class FedPD(Algorithm):
    name, label, year = "fedpd", "FedPD", 2021
    up = ("z",)
    dp = ClientPrivacy(refused="clients send models, not changes, whose norm no clip can bound usefully")
    requires = dict(participation=1.0, weighting="uniform", server_lr=1.0, wire="fp32")  # z is a whole model
    eta: float = hyper(1.0, "1 / weight of the proximal term", above=0)
    skip: float = hyper(0.0, "p, the probability that nobody talks at the end of a round", least=0, below=1)
    start_at: str = hyper("warm", "clients start at their own last x_i, or at x0", choices=("warm", "cold"))

    def __init__(self, config: Config, *more: Any):
        super().__init__(config, *more)
        self.client_state = ("lam_i", "x_i", "x0_i") if self.skip else ("lam_i", "x_i")

    def communicates(self, t: int) -> bool:
        return self.coin(t) >= self.skip

    def anchor(self, c: ClientVectors, s: Vectors) -> Tensor:
        """x0."""
        return c.x0_i if self.skip else s.x

    def enter(self, c: ClientVectors, s: Vectors) -> None:
        for name in self.client_state[1:]:
            getattr(c, name).copy_(s.x)

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        if self.skip and (r.t == 0 or self.communicates(r.t - 1)):
            c.x0_i.copy_(s.x.expand_as(c.x))
        c.x.copy_(c.x_i if self.start_at == "warm" else self.anchor(c, s).expand_as(c.x))

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g.add_(c.lam_i).add_(c.x - self.anchor(c, s), alpha=1 / self.eta)

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        c.lam_i.add_(c.x - self.anchor(c, s), alpha=1 / self.eta)
        c.x_i.copy_(c.x)
        sent = c.x.add_(c.lam_i, alpha=self.eta)
        if self.skip:
            c.x0_i.copy_(sent)
        return {"z": sent}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        s.x.copy_(mean["z"])
