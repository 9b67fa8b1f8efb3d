"""FedSpeed (Sun et al., 2023): FedDyn's correction, and gradients taken ahead of x as in FedSAM.

client   g1, g2 as FedSAM;   d = clip((1 - q) * g1 + q * g2) + a * ((x - x^t) - e_i);   e_i = e_i + offset_i
server   --form code: as FedDyn;   paper: x = x - (mean(offset) + mean(e_i)), over the participants alone

The authors' code and paper differ, as the author says: q is 1 in the code, and the forms agree only if all clients
take part.
"""

from typing import Any

from ..settings import Config
from .base import ClientVectors, Round, Tensor, Vectors, hyper
from .feddyn import FedDyn
from .fedsam import FedSAM


class FedSpeed(FedSAM, FedDyn):
    name, label, year = "fedspeed", "FedSpeed", 2023
    alpha: float = hyper(0.1, "a, weight of the correction", least=0)
    q: float = hyper(1.0, "weight of the second gradient", least=0, most=1)
    form: str = hyper("code", "the server's step", choices=("code", "paper"))

    def __init__(self, config: Config, *more: Any):
        super().__init__(config, *more)
        if self.form == "paper":
            self.private, self.up = (), ("offset", "e")

    def before_clip(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g if self.q == 1 else g.mul_(self.q).add_(c.g1, alpha=1 - self.q)

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        sent = super().finish(c, s, r)
        return sent if self.form == "code" else {**sent, "e": c.e_i}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        if self.form == "code":
            super().server(s, mean, r)
        else:
            s.x.sub_(mean["offset"]).sub_(mean["e"])
