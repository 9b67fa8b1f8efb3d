"""A method that draws random numbers in every hook."""

from __future__ import annotations

import torch

from fedlada_mpi.algorithms import Algorithm


class Noisy(Algorithm):
    down = ("x", "a")
    derived = ("b",)
    slots = ("m",)
    client_state = ("h",)

    def start(self, s):
        s.a.normal_(0, 0.01)

    def enter(self, c, s):
        c.h.copy_(torch.rand_like(c.h) * 0.01)

    def begin(self, c, s, r):
        super().begin(c, s, r)
        c.m.copy_(torch.randn_like(c.m) * 0.01)

    def point(self, c, s, lr):
        return c.x + lr * torch.randn_like(c.x) * 0.01

    def before_clip(self, c, s, g):
        return g + torch.randn_like(g) * 0.01

    def direction(self, c, s, g):
        kept = torch.bernoulli(torch.full_like(g, 0.5))
        return g * kept + c.m + s.a + s.b + c.h

    def after_decay(self, c, s, d):
        return torch.nn.functional.dropout(d, 0.1)

    def finish(self, c, s, r):
        c.h.mul_(0.5)
        sent = super().finish(c, s, r)
        return {"offset": sent["offset"] + torch.randn_like(c.x) * 0.01}

    def server(self, s, mean, r):
        super().server(s, mean, r)
        s.a.mul_(torch.rand(()))

    def derive(self, s, x_previous, r):
        s.b.copy_(torch.randn_like(s.x) * 0.001)


class Quiet(Noisy):
    """The same but for what it draws in a local step, to see that these differ."""

    def before_clip(self, c, s, g):
        return g


class Shifted(Algorithm):
    """A step in which elements between parameters, which have no gradient, move as well."""

    def direction(self, c, s, g):
        return g.add_(0.5)
