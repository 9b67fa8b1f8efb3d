"""FedAvgM (Hsu et al., 2019): momentum on the server.

client   as FedAvg
server   v = b * v + mean(offset)
         x = x - eta_g * v;                          --nesterov: x - eta_g * (mean(offset) + b * v)

A sum, not an average: in the long run the rate is eta_g / (1 - b).
"""

from .base import Algorithm, Round, Tensor, Vectors, hyper


class FedAvgM(Algorithm):
    name, label, year = "fedavgm", "FedAvgM", 2019
    private = ("v",)
    momentum: float = hyper(0.9, "b, decay of the server's momentum", least=0, below=1)
    nesterov: bool = hyper(False, "look one step ahead, as in the experiments of Hsu et al.")

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        s.v.mul_(self.momentum).add_(mean["offset"])
        step = mean["offset"].add(s.v, alpha=self.momentum) if self.nesterov else s.v
        s.x.sub_(step, alpha=self.eta_g)
