"""FedCM (Xu et al., 2021): client-level momentum from the last global direction g_a.

client   x = x - eta_t * (clip(alpha * grad + (1 - alpha) * g_a) + lambda * x)
server   x as FedAvg;   g_a^{t+1} = mean(offset) / (K * eta_t)
"""

from .amended import Amended, amended
from .base import ClientVectors, Tensor, Vectors


class FedCM(Amended):
    name, label, year, colour = "fedcm", "FedCM", 2021, "#0078b4"
    paper_units = 2

    def before_clip(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return amended(g, s.g_a, self.alpha)
