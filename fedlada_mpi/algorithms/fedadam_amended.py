"""FedAdam(*): FedAdam with FedCM's client momentum.

The server's step is not along mean(offset), so g_a cannot be computed from successive x: it travels.

client   as FedCM
server   as FedAdam;   g_a^{t+1} = mean(offset) / (K * eta_t)
"""

from torch import Tensor

from . import register
from .base import Round, Vectors
from .fedadam import FedAdam
from .fedcm import FedCM


@register("fedadam_amended")
class FedAdamAmended(FedAdam):
    down = ("x", "g_a")
    paper_units = 2
    elementwise = False
    before_clip = FedCM.before_clip

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        super().server(s, mean, r)
        s.g_a.copy_(mean["offset"]).div_(r.steps * r.lr)
