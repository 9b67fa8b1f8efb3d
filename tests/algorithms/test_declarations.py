"""What a method must declare about itself."""

from __future__ import annotations

import pytest

from fedlada_mpi.algorithms import Algorithm
from fedlada_mpi.algorithms.fedcm import FedCM
from fedlada_mpi.algorithms.fedlada import FedLADA
from fedlada_mpi.algorithms.scaffold import Scaffold
from fedlada_mpi.config import resolve


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
