"""FedProx (Li et al., 2020): a proximal term holds the client near the server.

client   x = x - eta_t * (g + mu * (x - x^t))
"""

from .base import Algorithm, ClientVectors, Tensor, Vectors, hyper


class FedProx(Algorithm):
    name, label, year, colour = "fedprox", "FedProx", 2020, "#4b2d0f"
    mu: float = hyper(0.1, "weight of the proximal term", least=0)
    tuned = {"": dict(weight_decay=0.002)}

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g.add_(c.x - s.x, alpha=self.mu)
