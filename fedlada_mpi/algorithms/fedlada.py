"""FedLADA (Sun et al.), Algorithm 3, and LocalAdam, which is FedLADA without the amendment (alpha = 1).

client   x = x^t, m = 0, v_hat = v^t                                         lines 4-5
         m = beta1 * m + (1 - beta1) * g                                     line 8
         v = beta2 * v + (1 - beta2) * g * g                                 line 9
         v_hat = max(v, v_hat)                                               line 10
         x = x - eta_t * (alpha * m / sqrt(v_hat) + (1 - alpha) * g_a^t)     lines 11-12
server   v^{t+1} = mean(v_hat_{i,K})                                         line 16
         x^{t+1} = x^t - eta_g * mean(x^t - x_{i,K})                         line 17
         g_a^{t+1} = mean(x^t - x_{i,K}) / (K * eta_t)                       line 18

v starts a local round at zero or at v^t (``--v-init``); v^0 = eps_v^2, so v_hat is never zero.
"""

from torch import Tensor

from . import register
from .base import Algorithm, Round, Vectors


@register("localadam")
class LocalAdam(Algorithm):
    down = ("x", "v")
    up = ("offset", "v_hat")
    slots = ("m", "v", "v_hat")
    paper_units = 2

    def start(self, s: Vectors) -> None:
        s.v.fill_(self.config.eps_v**2)

    def begin(self, c: Vectors, s: Vectors) -> None:
        super().begin(c, s)
        c.m.zero_()
        c.v_hat.copy_(s.v.expand_as(c.v_hat))
        if self.config.v_init == "zero":
            c.v.zero_()
        else:
            c.v.copy_(c.v_hat)

    def direction(self, c: Vectors, s: Vectors, g: Tensor) -> Tensor:
        c.m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        c.v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        c.v_hat.clamp_(min=c.v)
        return c.m / c.v_hat.sqrt()

    def finish(self, c: Vectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        return {**super().finish(c, s, r), "v_hat": c.v_hat}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        s.v.copy_(mean["v_hat"])
        super().server(s, mean, r)


@register("fedlada")
class FedLADA(LocalAdam):
    derived = ("g_a",)

    def direction(self, c: Vectors, s: Vectors, g: Tensor) -> Tensor:
        adaptive = super().direction(c, s, g)
        return adaptive.mul_(self.alpha).add_(s.g_a, alpha=1 - self.alpha)
