"""FedSAM (Qu et al., 2022): the gradient is taken where the loss is highest nearby.

client   g1 = gradient at x, neither clipped nor decayed
         g2 = gradient of the same batch at x + rho * g1 / (|g1| + 1e-7),   d = clip(g2)
server   as FedAvg

Checked against third-party code only; the default of rho is that code's.
"""

from .base import Algorithm, ClientVectors, Tensor, Vectors, hyper


class FedSAM(Algorithm):
    name, label, year = "fedsam", "FedSAM", 2022
    gradients = 2
    rho: float = hyper(0.1, "radius in which the loss is highest", least=0)

    def point(self, c: ClientVectors, s: Vectors, lr: Tensor) -> Tensor | None:
        g1 = c.g1.to(c.x.dtype)
        return c.x + g1 * (self.rho / (g1.norm(dim=1, keepdim=True) + 1e-7))
