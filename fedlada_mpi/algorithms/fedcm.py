"""FedCM (Xu et al., 2021): client-level momentum from the last global direction g_a.

client   x = x - eta_t * (clip(alpha * grad + (1 - alpha) * g_a) + lambda * x)
server   x as FedAvg;   g_a^{t+1} = mean(offset) / (K * eta_t)
"""

from torch import Tensor

from . import register
from .base import Algorithm, Vectors


@register("fedcm")
class FedCM(Algorithm):
    derived = ("g_a",)
    paper_units = 2

    def amend(self, c: Vectors, s: Vectors, g: Tensor) -> Tensor:
        return g.mul_(self.alpha).add_(s.g_a, alpha=1 - self.alpha)
