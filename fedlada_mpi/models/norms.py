"""``--norm``: the BatchNorm layers of a model exchanged by layers that have no running statistics."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..settings import norm_groups
from ..support.errors import UserError

INSTANCE = {nn.BatchNorm1d: nn.InstanceNorm1d, nn.BatchNorm2d: nn.InstanceNorm2d, nn.BatchNorm3d: nn.InstanceNorm3d}


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


def exchange(model: str, module: nn.Module, norm: str) -> int:
    """Exchange every BatchNorm in place, and return how many; weights and biases keep their names and values."""
    found = module.named_modules(remove_duplicate=False)
    layers = [(name, layer) for name, layer in found if isinstance(layer, _BatchNorm)]
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers:
        if layer not in new:
            new[layer] = _replacement(f"--norm {norm}: {model}: {name}", layer, norm)
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, new[layer])
    return len(new)


def _replacement(what: str, layer: _BatchNorm, norm: str) -> nn.Module:
    channels = layer.num_features
    if norm == "none":
        return nn.Identity()
    new: nn.Module
    if norm == "instance":
        new = INSTANCE.get(type(layer), nn.InstanceNorm2d)(channels, layer.eps, affine=layer.affine)
    else:
        groups = norm_groups(norm)
        if channels % groups:
            raise UserError(f"{what} has {channels} channels, expected a multiple of {groups}: choose another --norm")
        new = nn.GroupNorm(groups, channels, layer.eps, layer.affine)
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    return new
