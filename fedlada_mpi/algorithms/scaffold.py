"""SCAFFOLD (Karimireddy et al., 2020), option II; a = alpha scales the correction (1 in the original).

client   x = x - eta_t * (g + a * (c - c_i))
         c_i+ = c_i - c + (x^t - x_{i,K}) / (K_i * eta_t),   dc_i = c_i+ - c_i
server   x as FedAvg;   c = c + (S/m) * mean(dc_i)
"""

from torch import Tensor

from . import register
from .base import Algorithm, ClientVectors, Round, Vectors


@register("scaffold")
class Scaffold(Algorithm):
    down = ("x", "c")
    up = ("offset", "dc")
    client_state = ("c_i",)
    paper_units = 2

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g.add_(s.c - c.c_i, alpha=self.alpha)

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        offset = super().finish(c, s, r)["offset"]
        dc = offset / (c.steps * r.lr) - s.c
        c.c_i.add_(dc)
        return {"offset": offset, "dc": dc}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        super().server(s, mean, r)
        s.c.add_(mean["dc"], alpha=r.participants / r.clients)
