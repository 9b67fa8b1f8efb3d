"""SCAFFOLD (Karimireddy et al., 2020), option II; a = alpha scales the correction (1 in the original).

client   x = x - eta_t * (g + a * (c - c_i))
         c_i+ = (x^t - x_{i,K}) / (K_i * eta_t) - a * (c - c_i),   dc_i = c_i+ - c_i
server   x as FedAvg;   c = c + (S/m) * mean(dc_i)

c_i+ is the mean of the raw local gradients: what the correction added is taken out again with its own scale.
"""

from collections.abc import Mapping

from .base import Algorithm, ClientVectors, Round, Tensor, Vectors, hyper


class Scaffold(Algorithm):
    name, label, year, colour = "scaffold", "SCAFFOLD", 2020, "#0f00a5"
    down = ("x", "c")
    up = ("offset", "dc")
    client_state = ("c_i",)
    requires = dict(robust="none")  # c adds up what clients keep
    paper_units = 2
    alpha: float = hyper(1.0, "scale a of the correction", least=0)

    def dp_scales(self, r: Round) -> Mapping[str, float]:
        return {"dc": r.lr * max(1.0, r.steps)}

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g.add_(s.c - c.c_i, alpha=self.alpha)

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        offset = super().finish(c, s, r)["offset"]
        # -a (c - c_i) - c_i, written so that a = 1 rounds like the original -c.
        dc = (offset / (c.steps * r.lr) - s.c).add_(s.c - c.c_i, alpha=1 - self.alpha)
        c.c_i.add_(dc)
        return {"offset": offset, "dc": dc}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        super().server(s, mean, r)
        s.c.add_(mean["dc"], alpha=r.participants / r.clients)
