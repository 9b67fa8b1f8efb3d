"""FedAdam (Reddi et al., 2021): local SGD, and Adam on the server; no bias correction.

server   D = mean(offset)
         m = beta1 * m + (1 - beta1) * D
         v = beta2 * v + (1 - beta2) * D * D
         x = x - eta_g * m / (sqrt(v) + eps)

The FedLADA paper's "initial second-order momenta term" of 1e-2 is read as eps; --v0 0.01 is the other reading.
"""

from .base import Algorithm, Round, Tensor, Vectors, hyper


class FedAdam(Algorithm):
    name, label, year, colour = "fedadam", "FedAdam", 2021, "#875a00"
    private = ("m", "v")
    beta1: float = hyper(0.9, "first-moment decay", least=0, below=1)
    beta2: float = hyper(0.99, "second-moment decay", least=0, below=1)
    eps: float = hyper(0.01, "epsilon of the denominator", above=0)
    v0: float = hyper(0.0, "v at the start", least=0)
    presets = {"": dict(Algorithm.presets[""], server_lr=0.1)}

    def start(self, s: Vectors) -> None:
        s.v.fill_(self.v0)

    def second_moment(self, v: Tensor, delta: Tensor) -> None:
        v.mul_(self.beta2).addcmul_(delta, delta, value=1 - self.beta2)

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        delta = mean["offset"]
        s.m.mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
        self.second_moment(s.v, delta)
        s.x.addcdiv_(s.m, s.v.sqrt().add_(self.eps), value=-self.eta_g)
