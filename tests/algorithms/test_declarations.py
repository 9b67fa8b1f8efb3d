"""What a method must declare about itself."""

from __future__ import annotations

import pytest
from method_cases import CASES

from fedlada_mpi.algorithms import Algorithm, create, resolve
from fedlada_mpi.algorithms.dry_run import steps_alone
from fedlada_mpi.support.errors import UserError


class Shifted(Algorithm):
    def before_clip(self, c, s, g):
        return g.add_(1.0)


class Normed(Algorithm):
    def direction(self, c, s, g):
        return g / c.x.norm(dim=1, keepdim=True) + c.x.norm(dim=1, keepdim=True)


class Started(Algorithm):
    def begin(self, c, s, r):
        c.x.copy_((s.x / s.x.norm()).expand_as(c.x))


class Sent(Algorithm):
    def finish(self, c, s, r):
        offset = super().finish(c, s, r)["offset"]
        return {"offset": offset / offset.norm(dim=1, keepdim=True)}


class Counted(Algorithm):
    scalars = ("length",)

    def finish(self, c, s, r):
        offset = super().finish(c, s, r)["offset"]
        return {"offset": offset, "length": offset.norm(dim=1, keepdim=True)}


class Ahead(Algorithm):
    def point(self, c, s, lr):
        return c.x / c.x.norm(dim=1, keepdim=True)


# Of the built-in methods without client state: a clip scales what these add to the gradient, or they have norms.
TOGETHER = ("fedcm", "fedadam_amended", "fedlamb", "mofedsam")


@pytest.mark.parametrize("name", CASES)
def test_which_methods_step_parameters_without_a_gradient_alone(name):
    method = create(resolve({"algorithm": name}).config)
    assert steps_alone(method) == (name not in TOGETHER and not method.client_state)


@pytest.mark.parametrize("method", [Shifted, Normed, Started, Sent, Counted, Ahead])
def test_own_methods_that_do_not(method):
    assert not steps_alone(method(resolve({"algorithm": "fedavg"}).config))


OTHER = dict(weighting="size", server_lr=0.7, participation=0.5)


@pytest.mark.parametrize("method", CASES)
def test_settings_that_a_method_cannot_change_are_refused(method):
    for name, value in OTHER.items():
        if name in CASES[method].requires:
            with pytest.raises(UserError, match=f"^--{name.replace('_', '-')}: got .* for {method}$"):
                resolve({"algorithm": method, name: value})
        else:
            resolve({"algorithm": method, name: value})


def test_fednova_with_momentum_and_prox_is_refused():
    with pytest.raises(UserError, match="contradict"):
        resolve(dict(algorithm="fednova", momentum=0.5, mu=0.1))


@pytest.mark.parametrize(
    ("method", "settings", "server", "traffic"),
    [
        ("fednova", dict(server_momentum=0.0), (), (1, 1)),
        ("local_momentum", dict(buffer="reset"), (), (1, 1)),
        ("local_adaptivity", dict(correction="local"), (), (1, 1)),
        ("local_adaptivity", dict(server_optimizer="adam"), ("m", "v"), (1, 2)),
        ("fedspeed", dict(form="paper"), (), (1, 2)),
        ("mimelite", dict(base="adam"), ("m", "v"), (3, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_moves_follows_the_settings(method, settings, server, traffic):
    """What the server keeps in addition to x, and the vectors down and up per participant and round."""
    a = create(resolve(dict(algorithm=method, **settings)).config)
    assert {*a.down, *a.derived, *a.private} == {"x", *server}
    assert (len(a.down), len(a.up)) == traffic
