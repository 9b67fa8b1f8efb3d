"""Local SGD with momentum (Yu et al., 2019).

client   u = b * u + g,   d = u;   --nesterov: d = g + b * u
         u starts a round at u^t (--buffer average) or at zero (reset)
server   x as FedAvg;   average: u^{t+1} = mean(u_{i,K})

The paper has full participation and equal K; here the mean over the participants goes to all. ``reset`` is also a mode
of SlowMo's and FedNova's code.
"""

from collections.abc import Mapping
from typing import Any

from ..settings import Config
from .base import Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper


class LocalMomentum(Algorithm):
    name, label, year = "local_momentum", "Local momentum", 2019
    slots = ("u",)
    paper_units = 2
    dp = ClientPrivacy(changes={"u": "u"})
    momentum: float = hyper(0.9, "b, decay of the momentum", least=0, below=1)
    buffer: str = hyper("average", "the momentum at the start of a round", choices=("average", "reset"))
    nesterov: bool = hyper(False, "look one step ahead")

    def __init__(self, config: Config, *more: Any):
        super().__init__(config, *more)
        if self.buffer == "average":
            self.down, self.up = ("x", "u"), ("offset", "u")

    def dp_scales(self, r: Round) -> Mapping[str, float]:
        return {"u": r.lr}

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        super().begin(c, s, r)
        if self.buffer == "average":
            c.u.copy_(s.u.expand_as(c.u))
        else:
            c.u.zero_()

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        c.u.mul_(self.momentum).add_(g)
        return g.add_(c.u, alpha=self.momentum) if self.nesterov else g.copy_(c.u)

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        sent = super().finish(c, s, r)
        return {**sent, "u": c.u} if self.buffer == "average" else sent

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        super().server(s, mean, r)
        if self.buffer == "average":
            s.u.copy_(mean["u"])
