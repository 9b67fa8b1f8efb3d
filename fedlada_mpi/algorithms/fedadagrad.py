"""FedAdagrad (Reddi et al., 2021): Adagrad on the server.

server   D = mean(offset)
         v = v + D * D
         x = x - eta_g * D / (sqrt(v) + eps)
"""

from .base import Algorithm, Round, Tensor, Vectors, hyper


class FedAdagrad(Algorithm):
    name, label, year = "fedadagrad", "FedAdagrad", 2021
    private = ("v",)
    eps: float = hyper(0.01, "epsilon of the denominator", above=0)
    v0: float = hyper(0.0, "v at the start", least=0)
    presets = {"": dict(Algorithm.presets[""], server_lr=0.1)}

    def start(self, s: Vectors) -> None:
        s.v.fill_(self.v0)

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        delta = mean["offset"]
        s.v.addcmul_(delta, delta)
        s.x.addcdiv_(delta, s.v.sqrt().add_(self.eps), value=-self.eta_g)
