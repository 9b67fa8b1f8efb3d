"""Models by name: built-in ones (``MODELS``), ``torchvision:NAME``, or a user's own ``package.module:function``.

A user's function takes ``(classes, image_shape)``, with ``image_shape`` (rows, columns, channels), and returns an
``nn.Module`` with an ordinary NCHW forward. From Python, a module may be given itself; the run has a copy, which starts
from its values. Like the built-in models it is put onto the stacked layers (``translate.py``); one that cannot be
trains on the generic path (functional torch), which is slower. Frozen parameters and buffers are constants: neither
trained nor sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..settings import Config
from ..support.errors import UserError, shortened
from ..support.rng import torch_seeded
from ..support.suggestions import did_you_mean
from ..support.user_code import TORCHVISION, load_object, users_code
from . import norms, vision
from .agreement import disagreement
from .architectures import Activation, MakeActivation, cnn, lenet, lenet3, resnet18
from .dry_run import dry_run
from .layout import Layout
from .network import ImageShape, Network
from .parameters import tensors
from .tracing import NotTraceable
from .translate import translate

__all__ = ["MODELS", "Network", "build"]

MODELS: dict[str, Callable[[int, ImageShape, MakeActivation], nn.Module]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "lenet3": lenet3,
    "cnn": cnn,
}


def build(
    name: str,
    classes: int,
    image_shape: ImageShape,
    activation: str = "relu",
    seed: int = 0,
    stacked: bool = True,
    norm: str = "",
    smu_mu: float = Config.smu_mu,
) -> Network:
    """The network ``name`` for images [H, W, C], initialised from ``seed`` alone."""
    with torch_seeded(seed):
        notes: list[str] = []
        if ":" in name:
            module, notes = _by_name(name, classes, image_shape, norm)
            module = dry_run(name, module, classes, image_shape)
        elif name in MODELS:
            try:
                module = MODELS[name](classes, image_shape, partial(Activation, activation, smu_mu))
            except ValueError as error:
                raise UserError(f"--model {name}: {error}") from None
        else:
            known = f"{', '.join(MODELS)}, torchvision:NAME, package.module:function or path/file.py:function"
            raise UserError(f"--model: got {shortened(name)}, expected one of {known}{did_you_mean(name, MODELS)}")
        network = _generic(name, module, image_shape, notes)
        if not stacked:
            return network
        try:
            return _stacked(network, users_own=name not in MODELS)
        except NotTraceable as error:
            network.untraceable_because = str(error)
            return network


def _generic(name: str, module: nn.Module, image_shape: ImageShape, notes: list[str]) -> Network:
    parameters = [(n, p.shape) for n, p in module.named_parameters() if p.requires_grad]
    trained = {n for n, _ in parameters}
    constants = {n: t.detach().clone() for n, t in tensors(module).items() if n not in trained}
    return Network(name, module, image_shape, Layout(parameters), constants=constants, notes=notes)


def _by_name(name: str, classes: int, image_shape: ImageShape, norm: str) -> tuple[Any, list[str]]:
    """torchvision's or a user's own model with its BatchNorm layers exchanged, and what is to be said of it."""
    notes: list[str] = []
    if name.startswith(TORCHVISION):
        module, notes = vision.torchvision_model(name, classes, image_shape[2])
    else:
        function = load_object("--model", name, "package.module:function or path/file.py:function")
        with users_code(f"--model {name}", "a function of (classes, image_shape) that returns an nn.Module"):
            own = isinstance(function, nn.Module)
            module = copy.deepcopy(function) if own else function(classes, image_shape)
    wanted = norm or (vision.NORM if name.startswith(TORCHVISION) else "")
    if wanted and isinstance(module, nn.Module):
        count = norms.exchange(name, module, wanted)
        if count:
            notes.append(f"{count} BatchNorm layer{'s' * (count > 1)} exchanged, --norm {wanted}")
        elif norm:
            raise UserError(f"--norm {norm}: {name} has no BatchNorm to exchange: leave it out")
    return module, notes


def _stacked(network: Network, users_own: bool) -> Network:
    """The network with a stacked forward; a user's own is compared with the plain module."""
    traced = translate(network.module, network.image_shape)
    parameters = [(e.name, e.shape) for e in network.layout.entries]
    layout = Layout(parameters, traced.kernels, traced.dead, traced.groups)
    stacked = replace(network, layout=layout, forward=traced)
    if users_own and (found := disagreement(stacked)):
        raise NotTraceable(found)
    return stacked
