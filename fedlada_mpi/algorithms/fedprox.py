"""FedProx (Li et al., 2020): a proximal term holds the client near the server.

client   x = x - eta_t * (g + mu * (x - x^t))
"""

from torch import Tensor

from . import register
from .base import Algorithm, ClientVectors, Vectors


@register("fedprox")
class FedProx(Algorithm):
    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g.add_(c.x - s.x, alpha=self.config.mu)
