"""Local AdaAlter (Xie et al., 2020): Adagrad whose denominator is fixed within a round.

client   A2 = B2^t;   step k = 1, 2, ..:   x = x - eta_t * g / sqrt(B2^t + E),   A2 = A2 + g * g
         E = k * eps^2 (--form paper) or eps (code)
server   x as FedAvg;   B2 = mean(A2_i)

B2^0 = b0^2: 1 in the paper, 0 in the code, whose versions have a floor that grows with k and one that is fixed.
"""

from collections.abc import Mapping
from typing import Any

from ..settings import Config
from .base import NOISY_MOMENTS, Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper


class LocalAdaAlter(Algorithm):
    name, label, year = "local_adaalter", "Local AdaAlter", 2020
    down = ("x", "B2")
    up = ("offset", "A2")
    change_of = {"A2": "B2"}
    slots = ("A2",)
    paper_units = 2
    dp = ClientPrivacy(warning=NOISY_MOMENTS)
    eps: float = hyper(1.0, "floor of the denominator", above=0)
    b0: float = hyper(1.0, "B2 starts at b0^2", least=0)
    form: str = hyper("paper", "the floor grows with the steps, or is fixed", choices=("paper", "code"))

    def __init__(self, config: Config, *more: Any):
        super().__init__(config, *more)
        self.step_index = self.form == "paper"

    def dp_least(self) -> Mapping[str, float]:
        return {"A2": 0.0}

    def start(self, s: Vectors) -> None:
        s.B2.fill_(self.b0**2)

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        super().begin(c, s, r)
        c.A2.copy_(s.B2.expand_as(c.A2))

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        c.A2.addcmul_(g, g)
        floor = (c.k + 1) * self.eps**2 if self.form == "paper" else self.eps
        return g / (s.B2 + floor).sqrt()

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        return {**super().finish(c, s, r), "A2": c.A2}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        super().server(s, mean, r)
        s.B2.copy_(mean["A2"])
