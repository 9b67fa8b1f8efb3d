"""Local adaptivity with correction (Wang et al., 2021): adaptive clients, made comparable before they are averaged.

client   fresh state every round; P = 1 / (sqrt(v) + eps) after v's update
         sgd: d = g, P = 1;   adagrad: v = v + g * g, d = g * P
         adam, yogi: m = beta1 * m + (1 - beta1) * g, d = m * P, and v as Adam's or Yogi's
         q = beta1 * q + (1 - beta1) * P (sgd, adagrad: q = P),   A = A + q
server   D = mean(offset_i / A_i) / mean(1 / A_i) (--correction joint) or mean(offset_i / A_i) (local)
         x = x - eta_g * D, or Adam on D (--server-optimizer adam), as FedAdam's

The authors weight by the clients' sizes: --weighting size. Keras starts Adagrad's v at 0.1: --v0.
"""

from collections.abc import Mapping
from typing import Any

from ..settings import Config
from ..support.errors import UserError
from .base import Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper
from .fedyogi import yogi


class LocalAdaptivity(Algorithm):
    name, label, year = "local_adaptivity", "Local adaptivity", 2021
    paper_units = 2
    dp = ClientPrivacy(
        warning="offsets are divided by what adapts their steps before they are clipped: tune --clip-norm"
    )
    optimizer: str = hyper("adagrad", "of the clients", choices=("sgd", "adagrad", "adam", "yogi"))
    correction: str = hyper("joint", "how offsets are made comparable", choices=("joint", "local"))
    beta1: float = hyper(0.9, "first-moment decay of adam and yogi", least=0, below=1)
    beta2: float = hyper(0.99, "second-moment decay of adam and yogi", least=0, below=1)
    eps: float = hyper(1e-3, "epsilon of the clients' denominator", above=0)
    v0: float = hyper(0.0, "v at the start of a round", least=0)
    server_optimizer: str = hyper("sgd", "of the server", choices=("sgd", "adam"))
    server_beta1: float = hyper(0.9, "first-moment decay of the server's adam", least=0, below=1)
    server_beta2: float = hyper(0.99, "second-moment decay of the server's adam", least=0, below=1)
    server_eps: float = hyper(1e-3, "epsilon of the server's denominator", above=0)
    presets = {"": dict(lr=1e-2, weight_decay=1e-3, decay_mode="l2", server_lr=1.0)}

    def __init__(self, config: Config, *more: Any):
        super().__init__(config, *more)
        self.has_moment = self.optimizer in ("adam", "yogi")
        self.slots = {"sgd": ("A",), "adagrad": ("v", "A")}.get(self.optimizer, ("m", "v", "q", "A"))
        self.up = ("scaled", "inverse") if self.correction == "joint" else ("scaled",)
        self.private = ("m", "v") if self.server_optimizer == "adam" else ()

    @classmethod
    def check_dp(cls, algorithm: str, values: Mapping[str, Any]) -> None:
        super().check_dp(algorithm, values)
        if values["correction"] == "joint":
            raise UserError(
                "--dp client: --correction joint divides by a mean that has noise: got joint, expected local"
            )

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        super().begin(c, s, r)
        for name in self.slots:
            getattr(c, name).fill_(self.v0 if name == "v" else 0.0)

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        if self.optimizer == "sgd":
            c.A.add_(1.0)
            return g
        if self.optimizer == "adagrad":
            c.v.addcmul_(g, g)
        elif self.optimizer == "adam":
            c.v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        else:
            yogi(c.v, g, self.beta2)
        p = 1 / (c.v.sqrt() + self.eps)
        if not self.has_moment:
            c.A.add_(p)
            return g.mul_(p)
        c.m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        c.q.mul_(self.beta1).add_(p, alpha=1 - self.beta1)
        c.A.add_(c.q)
        return c.m * p

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        inverse = (1 / c.A).masked_fill_(c.A == 0, 0.0)
        sent = {"scaled": super().finish(c, s, r)["offset"].mul_(inverse)}
        return {**sent, "inverse": inverse} if self.correction == "joint" else sent

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        delta = mean["scaled"]
        if self.correction == "joint":
            delta = delta.div_(mean["inverse"]).masked_fill_(mean["inverse"] == 0, 0.0)
        if self.server_optimizer == "sgd":
            s.x.sub_(delta, alpha=self.eta_g)
            return
        s.m.mul_(self.server_beta1).add_(delta, alpha=1 - self.server_beta1)
        s.v.mul_(self.server_beta2).addcmul_(delta, delta, value=1 - self.server_beta2)
        s.x.addcdiv_(s.m, s.v.sqrt().add_(self.server_eps), value=-self.eta_g)
