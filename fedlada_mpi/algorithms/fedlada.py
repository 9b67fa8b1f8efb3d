"""FedLADA (Sun et al.), Algorithm 3, and LocalAdam, which is FedLADA without the amendment (alpha = 1).

1-2    for each round t, select S^t                        Server.run, Server.round, rng.participants
4      transfer x^t and v^t                                down; Silo.receive
5      x = x^t, m = 0, v_hat = v^t                         begin
6-7    K times: g = clip(mini-batch gradient)              Trainer; gradients.py; the clip is in step.py
8      m = beta1 * m + (1 - beta1) * g                     LocalAdam.direction
9      v = beta2 * v + (1 - beta2) * g * g                 LocalAdam.direction
10     v_hat = max(v, v_hat)                               LocalAdam.direction
11     theta = 1 / sqrt(v_hat)                             LocalAdam.direction
12     d = alpha * m * theta + (1 - alpha) * g_a^t         FedLADA.direction
       x = x - eta_t * (d + lambda * x)                    step.py (decoupled decay; l2: lambda * x is added to g)
14     send x^t - x_{i,K} and v_hat_{i,K}                  finish; Trainer and Silo.train add them up
16     v^{t+1} = mean(v_hat_{i,K})                         server
17     x^{t+1} = x^t - eta_g * mean(x^t - x_{i,K})         Algorithm.server
18     g_a^{t+1} = (x^t - x^{t+1}) / (eta_g * eta_t * K)   Amended.derive

v starts a local round at zero or at v^t (``--v-init``); v^0 = eps_v^2, so v_hat is never zero.
"""

from .amended import Amended, amended
from .base import Algorithm, ClientVectors, Round, Tensor, Vectors, hyper


class LocalAdam(Algorithm):
    name, label, year, colour = "localadam", "LocalAdam", 2020, "#009e73"
    down = ("x", "v")
    up = ("offset", "v_hat")
    slots = ("m", "v", "v_hat")
    paper_units = 2
    alpha: float = hyper(1.0, "1: no amendment", least=1, most=1)
    beta1: float = hyper(0.9, "first-moment decay", least=0, below=1)
    beta2: float = hyper(0.99, "second-moment decay", least=0, below=1)
    eps_v: float = hyper(1e-8, "v^0 = eps_v^2", above=0)
    v_init: str = hyper("zero", "v at the start of a local round", choices=("zero", "server"))
    presets = {
        "": dict(lr=1e-3, weight_decay=1e-2, decay_mode="decoupled", server_lr=1.0),
        "digits": dict(lr=4e-3),
    }

    def start(self, s: Vectors) -> None:
        s.v.fill_(self.eps_v**2)

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        super().begin(c, s, r)
        c.m.zero_()
        c.v_hat.copy_(s.v.expand_as(c.v_hat))
        if self.v_init == "zero":
            c.v.zero_()
        else:
            c.v.copy_(c.v_hat)

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        c.m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        c.v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        c.v_hat.clamp_(min=c.v)
        return c.m / c.v_hat.sqrt()

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        return {**super().finish(c, s, r), "v_hat": c.v_hat}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        s.v.copy_(mean["v_hat"])
        super().server(s, mean, r)


class FedLADA(Amended, LocalAdam):
    name, label, year, colour = "fedlada", "FedLADA", 2023, "#d9400f"
    alpha: float = hyper(0.1, "weight of the client's own direction; the rest is g_a's", above=0, most=1)
    presets = {
        "": LocalAdam.presets[""],
        "digits": dict(lr=4e-3, alpha=0.3),
        "cifar100": dict(alpha=0.05),
        "tinyimagenet": dict(alpha=0.05),
    }

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return amended(super().direction(c, s, g), s.g_a, self.alpha)
