"""FedDR (Tran-Dinh et al., 2021) without a regulariser on the server: randomised Douglas-Rachford splitting.

client   y_i = y_i + alpha * (x^t - x_i);   xh_i is 2 * x_i - y_i before and after
         from its last x_i (--start-at warm, the paper) or from x^t (cold):   d = g + (x - y_i) / eta;   x_i = x
         sends the change of xh_i
server   x = x + (S/m) * mean(change), which is the mean of xh_i over all m clients

All vectors of a client start at x^0, which new clients still need later: every rank keeps it.
"""

from .base import Algorithm, ClientPrivacy, ClientVectors, Round, Tensor, Vectors, hyper


class FedDR(Algorithm):
    name, label, year = "feddr", "FedDR", 2021
    derived = ("x0",)
    up = ("change",)
    dp = ClientPrivacy(
        refused="the model is the mean of what clients keep, which clipped changes would no longer add up to"
    )
    slots = ("xh",)
    client_state = ("x_i", "y_i")
    requires = dict(weighting="uniform", server_lr=1.0, robust="none")  # x adds up what clients keep
    eta: float = hyper(1.0, "1 / weight of the proximal term", above=0)
    alpha: float = hyper(0.9, "relaxation", above=0, most=2)
    start_at: str = hyper("warm", "clients start at their own last x_i, or at x^t", choices=("warm", "cold"))

    def start(self, s: Vectors) -> None:
        s.x0.copy_(s.x)

    def enter(self, c: ClientVectors, s: Vectors) -> None:
        c.x_i.copy_(s.x0)
        c.y_i.copy_(s.x0)

    def begin(self, c: ClientVectors, s: Vectors, r: Round) -> None:
        c.xh.copy_(c.x_i).mul_(2).sub_(c.y_i)
        c.y_i.add_(s.x - c.x_i, alpha=self.alpha)
        c.x.copy_(c.x_i if self.start_at == "warm" else s.x.expand_as(c.x))

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g.add_(c.x - c.y_i, alpha=1 / self.eta)

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        c.x_i.copy_(c.x)
        return {"change": c.x.mul_(2).sub_(c.y_i).sub_(c.xh)}

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        s.x.add_(mean["change"], alpha=r.participants / r.clients)
