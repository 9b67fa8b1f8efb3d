"""FedSplit (Pathak and Wainwright, 2020): Peaceman-Rachford splitting; all clients take part.

client   y = 2 * x^t - z_i
         from its last x_i (--start-at warm) or from x^t (cold):   d = g + (x - y) / eta;   x_i = x
         z_i = z_i + 2 * (x_i - x^t)
server   x = mean(z_i)

z_i starts at x^0. As FedDR with alpha = 2 it is the same method.
"""

from .base import Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper


class FedSplit(Algorithm):
    name, label, year = "fedsplit", "FedSplit", 2020
    up = ("z",)
    dp = ClientPrivacy(refused="clients send models, not changes, whose norm no clip can bound usefully")
    slots = ("y",)
    client_state = ("x_i", "z_i")
    requires = dict(participation=1.0, weighting="uniform", server_lr=1.0, wire="fp32")  # z is a whole model
    eta: float = hyper(1.0, "1 / weight of the proximal term", above=0)
    start_at: str = hyper("warm", "clients start at their own last x_i, or at x^t", choices=("warm", "cold"))

    def enter(self, c: ClientVectors, s: Vectors) -> None:
        c.x_i.copy_(s.x)
        c.z_i.copy_(s.x)

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        c.y.copy_(s.x.expand_as(c.y)).mul_(2).sub_(c.z_i)
        c.x.copy_(c.x_i if self.start_at == "warm" else s.x.expand_as(c.x))

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g.add_(c.x - c.y, alpha=1 / self.eta)

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        c.x_i.copy_(c.x)
        c.z_i.add_(c.x - s.x, alpha=2)
        return {"z": c.z_i}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        s.x.copy_(mean["z"])
