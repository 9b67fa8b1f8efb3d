"""Amended methods: the client's direction is mixed with g_a, the direction in which the server last moved.

client   d = alpha * d + (1 - alpha) * g_a
server   g_a^{t+1} = mean(offset) / (K * eta_t)

As x^{t+1} = x^t - eta_g * mean(offset), every rank computes g_a from successive x, and it need not travel.
"""

from .base import Algorithm, ClientPrivacy, Round, Tensor, Vectors, hyper


def amended(d: Tensor, g_a: Tensor, alpha: float) -> Tensor:
    """In place: alpha * d + (1 - alpha) * g_a."""
    return d.mul_(alpha).add_(g_a, alpha=1 - alpha)


class Amended(Algorithm):
    """A mixin that provides ``s.g_a`` on every rank."""

    derived = ("g_a",)
    amends = True
    dp = ClientPrivacy(fixed_steps=True)
    alpha: float = hyper(0.1, "weight of the client's own direction; the rest is g_a's", least=0, most=1)

    def derive(self, s: Vectors, x_previous: Tensor, r: Round) -> None:
        s.g_a.copy_(x_previous).sub_(s.x).div_(self.eta_g * r.steps * r.lr)
