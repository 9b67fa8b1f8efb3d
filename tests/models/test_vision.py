"""torchvision's models by name, and the exchange of BatchNorm layers."""

from __future__ import annotations

import builtins
import sys

import pytest
import torch
from torch import nn

from fedlada_mpi import models
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.models.norms import exchange
from fedlada_mpi.support.errors import UserError

NARROW = (32, 32, 3)


def refused(name: str, shape=NARROW, norm: str = "") -> str:
    with pytest.raises(UserError) as found:
        models.build(f"torchvision:{name}", 10, shape, norm=norm)
    return str(found.value)


def net() -> nn.Module:
    shared = nn.BatchNorm2d(6, affine=False)
    layers = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6, eps=0.25), shared, nn.Sequential(shared))
    layers[1].weight.data = torch.arange(1.0, 7)
    layers[1].requires_grad_(False)
    return layers


@pytest.mark.parametrize(("norm", "groups"), [("group:2", 2), ("group:3", 3), ("layer", 1)])
def test_batch_norm_becomes_group_norm(norm, groups):
    module = net()
    weight = module[1].weight
    assert exchange("mine", module, norm) == 2
    assert repr(module[1]) == repr(nn.GroupNorm(groups, 6, eps=0.25))
    assert module[1].weight is weight
    assert not module[1].weight.requires_grad
    assert module[2] is module[3][0]
    assert repr(module[2]) == repr(nn.GroupNorm(groups, 6, affine=False))
    assert set(module.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize(("norm", "expected"), [("instance", nn.InstanceNorm2d), ("none", nn.Identity)])
def test_instance_norm_or_none(norm, expected):
    module = net()
    exchange("mine", module, norm)
    assert [type(module[i]) for i in (1, 2)] == [expected] * 2


def test_groups_that_do_not_divide_the_channels():
    with pytest.raises(UserError, match=r"^--norm group:4: mine: 1 has 6 channels, expected a multiple of 4: choose"):
        exchange("mine", net(), "group:4")


@pytest.mark.parametrize("norm", ["group", "group:0", "group:x", "group:-2", "batch", "group:2:3", "Layer"])
def test_norms_that_are_none(norm):
    with pytest.raises(UserError, match=r"^--norm: got .*expected group:N such as group:2, layer, instance or none"):
        resolve({"norm": norm, "model": "torchvision:resnet18"})


def test_a_norm_without_effect():
    with pytest.raises(UserError, match=r"^--norm has no effect on --model cnn, only on torchvision:NAME"):
        resolve({"norm": "group:2"})


def test_users_batch_norm_is_exchanged(tmp_path, monkeypatch):
    (tmp_path / "with_norms.py").write_text(
        "from torch import nn\n"
        "def normed(classes, shape):\n"
        "    return nn.Sequential(nn.Conv2d(shape[2], 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(classes))\n"
        "plain = lambda classes, shape: nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    network = models.build("with_norms:normed", 3, (8, 8, 2), norm="group:2")
    assert network.notes == ["1 BatchNorm layer exchanged, --norm group:2"]
    assert [e.name for e in network.layout.entries][2:4] == ["1.weight", "1.bias"]
    with pytest.raises(UserError, match=r"have no federated mean; use GroupNorm or LayerNorm, or give --norm group:2$"):
        models.build("with_norms:normed", 3, (8, 8, 2))
    with pytest.raises(UserError, match=r"^--norm layer: with_norms:plain has no BatchNorm to exchange: leave it out"):
        models.build("with_norms:plain", 3, (8, 8, 2), norm="layer")


def test_resnet18_is_the_built_in_one():
    """Same names, same initial values from the same seed."""
    pytest.importorskip("torchvision")
    theirs = models.build("torchvision:resnet18", 10, NARROW, seed=3, stacked=False)
    ours = models.build("resnet18", 10, NARROW, seed=3)
    mine = ours.state_dict(ours.initial())
    found = theirs.state_dict(theirs.initial())
    assert set(found) == set(mine)
    assert all(torch.equal(found[name], mine[name]) for name in mine)
    assert theirs.notes == ["20 BatchNorm layers exchanged, --norm group:2"]


def test_other_channels():
    pytest.importorskip("torchvision")
    network = models.build("torchvision:shufflenet_v2_x0_5", 5, (32, 32, 1))
    assert network.notes[0] == "conv1.0 takes 1 channel in place of 3"
    assert network.module.get_submodule("conv1.0").weight.shape == (24, 1, 3, 3)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("resnet8", NARROW, "torchvision has no classification model of that name (did you mean 'resnet18'?)"),
        ("squeezenet1_1", (8, 8, 3), "expected a model that takes images [3, 8, 8]"),
        ("googlenet", NARROW, "got a GoogLeNetOutputs from its forward pass, expected a tensor"),
    ],
)
def test_refused(name, shape, words):
    pytest.importorskip("torchvision")
    message = refused(name, shape)
    assert message.startswith(f"--model torchvision:{name}")
    assert words in message


def test_without_torchvision(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("torchvision"):
            raise ModuleNotFoundError("No module named 'torchvision'")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    assert "cannot import torchvision (No module named 'torchvision'); install the one for torch" in refused("resnet18")
