"""FedADC (Ozfatura et al., 2021): the server's momentum is spread over the local steps.

client   d = g + b_l * u / K_i;   --nesterov: the gradient is taken at x - eta_t * b_l * u / K_i
server   u = mean(offset) / eta_t + (b_g - b_l) * u
         x = x - eta_g * eta_t * u

The offsets hold b_l * u already, so u is the clients' mean sum of gradients plus b_g * u. Every rank computes u from
successive x. Uncertain: no code of the authors was found, and a library of their group does not divide by K. Decay is
taken at x, before the move of --nesterov.
"""

from .base import Algorithm, ClientVectors, Round, Tensor, Vectors, hyper


class FedADC(Algorithm):
    name, label, year = "fedadc", "FedADC", 2021
    derived = ("u",)
    paper_units = 2
    beta_local: float = hyper(0.9, "b_l, share of the momentum that acts in the local steps", least=0, below=1)
    beta_global: float = hyper(0.9, "b_g, decay of the momentum", least=0, below=1)
    nesterov: bool = hyper(False, "take the gradient where the momentum leads")

    def drift(self, c: ClientVectors, s: Vectors) -> Tensor:
        return s.u * self.beta_local / c.steps

    def point(self, c: ClientVectors, s: Vectors, lr: Tensor) -> Tensor | None:
        return c.x - lr * self.drift(c, s) if self.nesterov else None

    def direction(self, c: ClientVectors, s: Vectors, g: Tensor) -> Tensor:
        return g.add_(self.drift(c, s))

    def server(self, s: Vectors, mean: dict[str, Tensor], r: Round) -> None:
        u = (mean["offset"] / r.lr).add_(s.u, alpha=self.beta_global - self.beta_local)
        s.x.sub_(u, alpha=self.eta_g * r.lr)

    def derive(self, s: Vectors, x_previous: Tensor, r: Round) -> None:
        s.u.copy_(x_previous).sub_(s.x).div_(self.eta_g * r.lr)
