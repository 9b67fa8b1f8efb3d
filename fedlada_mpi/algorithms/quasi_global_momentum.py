"""Quasi-global momentum (Lin et al., 2021), with a server: momentum h of the server's own moves.

client   d = g + b * h, with h fixed in the round;   --nesterov: d = g + b * (b * h + g)
server   x as FedAvg;   h = mu * h + (1 - mu) * mean(offset) / (K * eta_t)

The authors' method is decentralised; this is its form on a complete graph that averages every K steps. Every rank
computes h from successive x.
"""

from .base import Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper


class QuasiGlobalMomentum(Algorithm):
    name, label, year = "quasi_global_momentum", "Quasi-global momentum", 2021
    derived = ("h",)
    paper_units = 2
    dp = ClientPrivacy(fixed_steps=True)
    momentum: float = hyper(0.9, "b, weight of h in a local step", least=0, below=1)
    mu: float = hyper(0.9, "decay of h", least=0, below=1)
    nesterov: bool = hyper(True, "look one step ahead, as in the authors' scripts")

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        b = self.momentum
        return g.mul_(1 + b).add_(s.h, alpha=b * b) if self.nesterov else g.add_(s.h, alpha=b)

    def derive(self, s: Vectors, x_previous: Tensor, r: Round) -> None:
        s.h.mul_(self.mu).add_(x_previous - s.x, alpha=(1 - self.mu) / (self.eta_g * r.steps * r.lr))
