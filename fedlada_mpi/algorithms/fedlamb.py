"""Fed-LAMB (Karimi et al., 2022): local steps as long, in every parameter tensor, as eta_t times the tensor's norm.

client   m = beta1 * m + (1 - beta1) * g,   v = beta2 * v + (1 - beta2) * g * g
         r = m / (sqrt(v_hat^t) + eps), with v_hat fixed in the round
         per tensor l:   w = r_l + lambda * x_l,   x_l = x_l - eta_t * (|x_l| / |w|) * w
server   x as FedAvg;   v_hat = max(v_hat, mean(v_{i,K})), from v_hat^0 = v0 on

The ratio is 1 where a norm is zero, as in LAMB; in the authors' code such tensors never move. Their text and their code
differ in where v starts a round (--v-start: v_hat^t, or the client's own v), and both keep m on the client (--m-start
client; zero needs no state). Bias correction is in the text only, and not here. ``--decay-mode decoupled`` is the decay
above.
"""

from typing import Any

from ..settings import Config
from .base import NOISY_MOMENTS, Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper


class FedLAMB(Algorithm):
    name, label, year = "fedlamb", "Fed-LAMB", 2022
    down = ("x", "v_hat")
    up = ("offset", "v")
    change_of = {"v": "v_hat"}
    paper_units = 2
    dp = ClientPrivacy(warning=NOISY_MOMENTS)
    fusable = False  # norms of single tensors
    beta1: float = hyper(0.9, "first-moment decay", least=0, below=1)
    beta2: float = hyper(0.999, "second-moment decay", least=0, below=1)
    eps: float = hyper(1e-8, "epsilon of the denominator", above=0)
    v0: float = hyper(1e-8, "v_hat^0", least=0)
    v_start: str = hyper(
        "server", "v at the start of a round: v_hat^t, or the client's own", choices=("server", "client")
    )
    m_start: str = hyper("zero", "m at the start of a round: zero, or the client's own", choices=("zero", "client"))
    presets = {"": dict(lr=1e-2, weight_decay=1e-2, decay_mode="decoupled", server_lr=1.0)}

    def __init__(self, config: Config, *more: Any):
        super().__init__(config, *more)
        kept = {"m": self.m_start == "client", "v": self.v_start == "client"}
        self.client_state = tuple(name for name in kept if kept[name])
        self.slots = tuple(name for name in kept if not kept[name])

    def start(self, s: Vectors) -> None:
        s.v_hat.fill_(self.v0)

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        super().begin(c, s, r)
        if self.m_start == "zero":
            c.m.zero_()
        if self.v_start == "server":
            c.v.copy_(s.v_hat.expand_as(c.v))

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        c.m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        c.v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        return c.m / (s.v_hat.sqrt() + self.eps)

    def after_decay(self, c: ClientVectors, s: Vectors, d: Tensor) -> Tensor:
        for places in self.tensors:
            x, w = (_squares([v[:, place] for place in places]) for v in (c.x, d))
            ratio = (x / w).sqrt_().masked_fill_((x == 0) | (w == 0), 1.0)
            for place in places:
                d[:, place].mul_(ratio)
        return d

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        return {**super().finish(c, s, r), "v": c.v}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        super().server(s, mean, r)
        s.v_hat.clamp_(min=mean["v"])


def _squares(pieces: list[Tensor]) -> Tensor:
    """The squared norm of a tensor in pieces, of every client, [C, 1]."""
    first, *rest = (piece.square().sum(1, keepdim=True) for piece in pieces)
    for more in rest:
        first += more
    return first
