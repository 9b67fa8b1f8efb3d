"""FedDyn (Acar et al., 2021): a dynamic regulariser lines up the optima of the clients with the server's.

client   d = g + a * ((x - x^t) - e_i);   afterwards   e_i = e_i + offset_i
server   h = h + (S/m) * mean(offset), which is the mean of e_i over all m clients
         x = x - (mean(offset) + h)

The paper's vectors are a * e_i and a * h. Only the gradient is clipped; the authors' code clips a part of the
correction with it.
"""

from .base import Algorithm, ClientVectors, Round, Tensor, Vectors, hyper


class FedDyn(Algorithm):
    name, label, year = "feddyn", "FedDyn", 2021
    private: tuple[str, ...] = ("h",)
    client_state = ("e_i",)
    requires = dict(weighting="uniform", server_lr=1.0, robust="none")  # h adds up what clients keep
    alpha: float = hyper(0.01, "a, weight of the regulariser", least=0)

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g.add_(c.x - s.x - c.e_i, alpha=self.alpha)

    def finish(self, c: ClientVectors, s: Vectors, r: Round) -> dict[str, Tensor]:
        sent = super().finish(c, s, r)
        c.e_i.add_(sent["offset"])
        return sent

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        s.h.add_(mean["offset"], alpha=r.participants / r.clients)
        s.x.sub_(mean["offset"]).sub_(s.h)
