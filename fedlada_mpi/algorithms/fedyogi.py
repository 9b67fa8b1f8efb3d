"""FedYogi (Reddi et al., 2021): FedAdam with Yogi's second moment, which changes by at most (1 - beta2) * D * D.

server   D = mean(offset)
         v = v - (1 - beta2) * D * D * sign(v - D * D);   the rest as FedAdam

v starts at v0, zero as in the authors' code (their text asks for v >= eps^2); no bias correction, as in their text.
"""

from .base import Tensor
from .fedadam import FedAdam


def yogi(v: Tensor, g: Tensor, beta2: float) -> None:
    """In place: v - (1 - beta2) * g * g * sign(v - g * g)."""
    square = g * g
    v.sub_((v - square).sign_().mul_(square), alpha=1 - beta2)


class FedYogi(FedAdam):
    name, label, year, colour = "fedyogi", "FedYogi", 2021, ""

    def second_moment(self, v: Tensor, delta: Tensor) -> None:
        yogi(v, delta, self.beta2)
