"""FedAdam(*): FedAdam with FedCM's client momentum.

The server's step is not along mean(offset), so g_a cannot be computed from successive x: it travels.

client   as FedCM
server   as FedAdam;   g_a^{t+1} = mean(offset) / (K * eta_t)
"""

from .amended import amended
from .base import ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper
from .fedadam import FedAdam


class FedAdamAmended(FedAdam):
    name, label, year, colour = "fedadam_amended", "FedAdam(*)", 2023, "#c34bff"
    alpha: float = hyper(0.1, "weight of the client's own gradient; the rest is g_a's", least=0, most=1)
    down = ("x", "g_a")
    paper_units = 2
    amends = True
    dp = ClientPrivacy(fixed_steps=True)

    def before_clip(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return amended(g, s.g_a, self.alpha)

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        super().server(s, mean, r)
        s.g_a.copy_(mean["offset"]).div_(r.steps * r.lr)
