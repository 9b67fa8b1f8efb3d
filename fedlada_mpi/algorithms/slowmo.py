"""SlowMo (Wang et al., 2020): slow momentum on the server, in units of a gradient.

client   as FedAvg
server   u = b * u + mean(offset) / eta_t
         x = x - eta_g * eta_t * u
"""

from .base import Algorithm, Round, Tensor, Vectors, hyper


class SlowMo(Algorithm):
    name, label, year = "slowmo", "SlowMo", 2020
    private = ("u",)
    momentum: float = hyper(0.5, "b, decay of the slow momentum", least=0, below=1)

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        s.u.mul_(self.momentum).add_(mean["offset"], alpha=1 / r.lr)
        s.x.sub_(s.u, alpha=self.eta_g * r.lr)
