"""FedLADA (Sun et al.), Algorithm 3, and LocalAdam, which is FedLADA without the amendment (alpha = 1).

1-2    for each round t, select S^t                        Server.run, Server.round, rng.participants
4      transfer x^t and v^t                                down; Silo.exchange
5      x = x^t, m = 0, v_hat = v^t                         begin
6-7    K times: g = clip(mini-batch gradient)              Trainer; gradients.py; the clip is in step.py
8      m = beta1 * m + (1 - beta1) * g                     LocalAdam.direction
9      v = beta2 * v + (1 - beta2) * g * g                 LocalAdam.direction
10     v_hat = max(v, v_hat)                               LocalAdam.direction
11     theta = 1 / sqrt(v_hat)                             LocalAdam.direction
12     d = alpha * m * theta + (1 - alpha) * g_a^t         FedLADA.direction
       x = x - eta_t * (d + lambda * x)                    step.py (decoupled decay; l2: lambda * x is added to g)
14     send x^t - x_{i,K} and v_hat_{i,K}                  finish; rounds/aggregate/ adds them up
16     v^{t+1} = mean(v_hat_{i,K})                         server
17     x^{t+1} = x^t - eta_g * mean(x^t - x_{i,K})         Algorithm.server
18     g_a^{t+1} = (x^t - x^{t+1}) / (eta_g * eta_t * K)   Amended.derive

v starts a local round at zero or at v^t (``--v-init``); v^0 = eps_v^2, so v_hat is never zero. The paper has two texts
on it: in one eps_v is 1e-8, in the other v^0 is, so that eps_v = 1e-4.

Other readings of lines 8 to 11:
--v-init fresh       v and v_hat start a round at zero, whatever the server sends: a new optimiser each round
--no-v-max           v_hat = v, Adam instead of AMSGrad; v may be zero, so eps must not be
--bias-correction    step k = 1, 2, .. has m / (1 - beta1^k) and, unless v starts at v^t, v / (1 - beta2^k) for m and v;
                     v is corrected before the maximum, which then keeps what single batches make of the first steps
--correct-after-max  the maximum is of v as it is, and theta is of v_hat / (1 - beta2^k): the order of torch.optim.Adam
--eps                theta = 1 / (sqrt(v_hat) + eps)

With --v-init fresh --bias-correction --eps 1e-8 and --no-v-max or --correct-after-max, a client's steps are those of a
new torch.optim.Adam, without and with amsgrad; --decay-mode decoupled makes it an AdamW.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..settings import Config
from ..support.errors import UserError
from .amended import Amended, amended
from .base import NOISY_MOMENTS, Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper


class LocalAdam(Algorithm):
    name, label, year, colour = "localadam", "LocalAdam", 2020, "#0fa587"
    down = ("x", "v")
    up = ("offset", "v_hat")
    change_of = {"v_hat": "v"}
    slots = ("m", "v", "v_hat")
    paper_units = 2
    dp = ClientPrivacy(warning=NOISY_MOMENTS)
    alpha: float = hyper(1.0, "1: no amendment", least=1, most=1)
    beta1: float = hyper(0.9, "first-moment decay", least=0, below=1)
    beta2: float = hyper(0.99, "second-moment decay", least=0, below=1)
    eps_v: float = hyper(1e-8, "v^0 = eps_v^2; 1e-4 for the paper's other text, v^0 = 1e-8", above=0)
    v_init: str = hyper(
        "zero", "v at the start of a local round; fresh: v_hat starts at zero, too", choices=("zero", "server", "fresh")
    )
    v_max: bool = hyper(True, "v_hat is the maximum of v, as in AMSGrad; otherwise v itself, as in Adam")
    bias_correction: bool = hyper(False, "Adam's bias correction within a local round, of what starts at zero")
    correct_after_max: bool = hyper(False, "correct the bias of the maximum of v, as torch does, not of v")
    eps: float = hyper(0.0, "epsilon that is added to sqrt(v_hat)", least=0)
    presets = {
        "": dict(lr=1e-3, weight_decay=1e-2, decay_mode="decoupled", server_lr=1.0),
        "digits": dict(lr=4e-3),
        "randhie": dict(lr=3e-3),
        "dd": dict(lr=1e-2),
        "shakespeare": dict(lr=1e-2),
        "digit-masks": dict(lr=4e-3),
    }
    tuned = {"": dict(weight_decay=0.05)}

    def __init__(self, config: Config, *more: Any):
        super().__init__(config, *more)
        self.step_index = self.bias_correction

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> None:
        if (not values["v_max"] or values["v_init"] == "fresh") and not values["eps"]:
            given = "--v-init fresh" if values["v_max"] else "--no-v-max"
            raise UserError(f"{given}: got --eps 0, expected one above 0, such as 1e-8, as v_hat may be zero")
        if values["correct_after_max"] and not (values["bias_correction"] and values["v_max"]):
            without = "with --no-v-max" if values["bias_correction"] else "without --bias-correction"
            raise UserError(f"--correct-after-max has no effect {without}: leave it out")

    def dp_least(self) -> Mapping[str, float]:
        return {"v_hat": self.eps_v**2}

    def start(self, s: Vectors) -> None:
        s.v.fill_(self.eps_v**2)

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        super().begin(c, s, r)
        c.m.zero_()
        if self.v_init == "fresh":
            c.v_hat.zero_()
        else:
            c.v_hat.copy_(s.v.expand_as(c.v_hat))
        if self.v_init == "server":
            c.v.copy_(c.v_hat)
        else:
            c.v.zero_()

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        c.m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        c.v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        m, v = c.m, c.v
        corrects_v = self.bias_correction and self.v_init != "server"
        if self.bias_correction:
            m = m / (1 - self.beta1 ** (c.k + 1))
        if corrects_v and not self.correct_after_max:
            v = v / (1 - self.beta2 ** (c.k + 1))
        if self.v_max:
            c.v_hat.clamp_(min=v)
        else:
            c.v_hat.copy_(v)
        if corrects_v and self.correct_after_max:
            root = (c.v_hat / (1 - self.beta2 ** (c.k + 1))).sqrt()
        else:
            root = c.v_hat.sqrt()
        return m / (root.add_(self.eps) if self.eps else root)

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        return {**super().finish(c, s, r), "v_hat": c.v_hat}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        s.v.copy_(mean["v_hat"])
        super().server(s, mean, r)


class FedLADA(Amended, LocalAdam):
    name, label, year, colour = "fedlada", "FedLADA", 2023, "#f05a4b"
    dp = replace(LocalAdam.dp, fixed_steps=True)
    alpha: float = hyper(0.1, "weight of the client's own direction; the rest is g_a's", above=0, most=1)
    presets = {
        **LocalAdam.presets,
        "digits": dict(lr=4e-3, alpha=0.3),
        "cifar100": dict(alpha=0.05),
        "tinyimagenet": dict(alpha=0.05),
    }
    tuned = {"": dict(weight_decay=0.05)}
    closest = {"": dict(weight_decay=0.05, lr_decay=0.996, crop="always")}

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return amended(super().direction(c, s, g), s.g_a, self.alpha)
