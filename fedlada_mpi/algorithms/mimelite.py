"""MimeLite (Karimireddy et al., 2021): clients use the server's optimiser state, which is fixed in the round.

client   --base momentum: d = (1 - beta1) * g + beta1 * m
         adam: d = ((1 - beta1) * g + beta1 * m) / (sqrt(v) + eps)
         c_i = gradient on all of its images at x^t, with lambda * x^t under --decay-mode l2
server   x as FedAvg;   m = beta1 * m + (1 - beta1) * mean(c_i);   adam: v = beta2 * v + (1 - beta2) * mean(c_i)^2

c_i costs one more pass over the client's images, which are neither flipped nor cropped in it. The averages are the
paper's form; the authors weight by the clients' sizes: --weighting size. v starts at v0; with 0 the steps of the first
round are long, (1 - beta1) * g / eps.
"""

from collections.abc import Mapping
from typing import Any

from ..settings import Config
from .base import Algorithm, ClientVectors, Round, Tensor, Vectors, hyper


class MimeLite(Algorithm):
    name, label, year = "mimelite", "MimeLite", 2021
    down: tuple[str, ...] = ("x", "m")
    up = ("offset", "c")
    full_gradient = True
    paper_units = 2
    base: str = hyper("momentum", "the server's optimiser", choices=("momentum", "adam"))
    beta1: float = hyper(0.9, "decay of m", least=0, below=1)
    beta2: float = hyper(0.99, "decay of v", least=0, below=1)
    eps: float = hyper(1e-3, "epsilon of adam's denominator", above=0)
    v0: float = hyper(0.0, "adam's v at the start", least=0)

    def __init__(self, config: Config, *more: Any):
        super().__init__(config, *more)
        if self.base == "adam":
            self.down = ("x", "m", "v")

    def start(self, s: Vectors) -> None:
        if self.base == "adam":
            s.v.fill_(self.v0)

    def dp_scales(self, r: Round) -> Mapping[str, float]:
        return {"c": r.lr * max(1.0, r.steps)}

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        d = g.mul_(1 - self.beta1).add_(s.m, alpha=self.beta1)
        return d / (s.v.sqrt() + self.eps) if self.base == "adam" else d

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        if self.config.decay_mode == "l2":
            c.full_g.add_(self.decaying(s.x, s), alpha=self.decay)
        return {**super().finish(c, s, r), "c": c.full_g}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        super().server(s, mean, r)
        s.m.mul_(self.beta1).add_(mean["c"], alpha=1 - self.beta1)
        if self.base == "adam":
            s.v.mul_(self.beta2).addcmul_(mean["c"], mean["c"], value=1 - self.beta2)
