"""FedAdam (Reddi et al., 2021): local SGD, and Adam on the server; no bias correction.

server   D = mean(offset)
         m = beta1 * m + (1 - beta1) * D
         v = beta2 * v + (1 - beta2) * D * D
         x = x - eta_g * m / (sqrt(v) + eps)
"""

from torch import Tensor

from . import register
from .base import Algorithm, Round, Vectors


@register("fedadam")
class FedAdam(Algorithm):
    private = ("m", "v")

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        delta = mean["offset"]
        s.m.mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
        s.v.mul_(self.beta2).addcmul_(delta, delta, value=1 - self.beta2)
        s.x.addcdiv_(s.m, s.v.sqrt().add_(self.config.eps), value=-self.eta_g)
