"""What a method must declare about itself."""

from __future__ import annotations

import pytest
from method_cases import CASES

from fedlada_mpi.algorithms import Algorithm, create
from fedlada_mpi.algorithms.fedcm import FedCM
from fedlada_mpi.algorithms.fedlada import FedLADA
from fedlada_mpi.algorithms.scaffold import Scaffold
from fedlada_mpi.config import resolve
from fedlada_mpi.errors import UserError


def shift(self, c, s, g):
    return g.add_(1.0)


def test_a_method_that_changes_the_gradient_before_the_clip_declares_elementwise():
    with pytest.raises(TypeError, match=r"^Forgetful overrides before_clip and must declare elementwise: False"):
        type("Forgetful", (Algorithm,), {"before_clip": shift})
    assert not type("Declared", (Algorithm,), {"before_clip": shift, "elementwise": False}).elementwise
    assert not type("Inherited", (FedCM,), {"before_clip": shift}).elementwise


@pytest.mark.parametrize(("method", "shares"), [(FedLADA, True), (FedCM, False), (Scaffold, False)])
def test_which_methods_share_gradient_free_parameters(method, shares):
    """FedCM clips them with the rest, and SCAFFOLD's c_i differ between clients."""
    assert method(resolve({"algorithm": method.name}).config).shares_gradient_free == shares


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
