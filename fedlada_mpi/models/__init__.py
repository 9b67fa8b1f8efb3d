"""Models by name: built-in ones (``MODELS``), ``torchvision:NAME``, or a user's own ``package.module:function``.

A user's function takes ``(classes, image_shape)``, with ``image_shape`` (rows, columns, channels), and returns an
``nn.Module`` with an ordinary NCHW forward. From Python, a module may be given itself; the run has a copy, which starts
from its values. Like the built-in models it is put onto the stacked layers (``translate.py``); one that cannot be
trains on the generic path (functional torch), which is slower. Frozen parameters and buffers are constants: neither
trained nor sent.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..settings import Config
from ..support.errors import UserError, did_you_mean, shortened
from ..support.rng import torch_seeded
from ..support.user_code import load_object, users_code
from . import norms, vision
from .agreement import disagreement
from .architectures import Activation, MakeActivation, cnn, lenet, lenet3, resnet18
from .layers import Stack
from .layout import Layout
from .randomness import Draws
from .tracing import NotTraceable
from .translate import Traced, translate
from .trial import dry_run, names_by_id, tensors
from .work import multiply_adds

ImageShape: TypeAlias = tuple[int, int, int]  # rows, columns, channels

MODELS: dict[str, Callable[[int, ImageShape, MakeActivation], nn.Module]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "lenet3": lenet3,
    "cnn": cnn,
}


@dataclass
class Network:
    """A plain module, its flat layout and, where it could be traced, the stacked forward.

    >>> network = build("cnn", classes=10, image_shape=(8, 8, 1))
    >>> network.layout.numel, network.untraceable_because
    (9930, '')
    >>> x = network.initial()
    >>> network.state_dict(x)["fc.weight"].shape
    torch.Size([10, 512])
    """

    name: str
    module: nn.Module
    image_shape: ImageShape
    layout: Layout  # of the parameters that are trained
    forward: Traced | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)  # frozen parameters and buffers
    draws: bool = False  # whether stacked layers draw random numbers in training
    untraceable_because: str = ""  # why there is no stacked forward
    notes: list[str] = field(default_factory=list)  # how it differs from what its name says

    def stack(self, values: Tensor, grads: Tensor | None = None) -> Stack:
        """The parameters ``values`` [C, live or more] for the stacked forward, and where their gradients go."""
        return Stack(self.layout, values, grads, constants=self.stacked_constants(values.dtype, values.device))

    def stacked_constants(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """As the stacked layers read them."""
        assert self.forward is not None
        numbers = {name: value for name, value in self.constants.items() if value.is_floating_point()}
        kernels = {name: kernel for name, kernel in self.forward.kernels.items() if name in numbers}
        layout = Layout([(n, v.shape) for n, v in numbers.items()], kernels, self.forward.dead, self.forward.groups)
        views = layout.views(layout.pack(numbers, dtype).to(device))
        return views | {name: value.to(device) for name, value in self.constants.items() if name not in numbers}

    @cached_property
    def work(self) -> int:
        """Multiply-adds of a forward pass over one image."""
        return multiply_adds(self.module, self.image_shape)

    def activation_bytes(self, image_shape: tuple[int, ...], images: int, dtype: torch.dtype) -> int:
        """What the stacked forward saves for the backward pass, and the largest columns once more."""
        assert self.forward is not None
        values, alive = torch.zeros(1, self.layout.live), []
        stack = self.stack(values, values)
        if self.draws:
            stack.draws = Draws(torch.zeros(1, dtype=torch.int64), stacked=True)
        saved: dict[int, int] = {}
        own = {value.untyped_storage().data_ptr() for value in stack.value.values()}

        def save(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # or the next one could get its address

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            self.forward(stack, torch.zeros(1, 1, *image_shape))
        # Layers keep what ``save`` returns, and ``save`` itself: a tensor that leads back to them is never freed.
        alive.clear()
        return (sum(saved.values()) + max(saved.values())) * images * dtype.itemsize // values.element_size()

    def initial(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The module's own parameters as a flat vector."""
        return self.layout.pack(dict(self.module.named_parameters()), dtype)

    def digest(self) -> str:
        """Of what a run does not train: the shapes, and the values of the constants."""
        value = hashlib.sha256(repr([(e.name, e.shape) for e in self.layout.entries]).encode())
        for name, constant in self.constants.items():
            data = constant.detach().cpu().contiguous()
            value.update(repr((name, data.dtype, tuple(data.shape))).encode())
            value.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
        return value.hexdigest()

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """What the module's ``load_state_dict`` takes: the parameters in ``x``, and the constants."""
        values = {**self.constants, **self.layout.unpack(x)}
        names = names_by_id(self.module)
        # A tensor that several layers share has a name in each of them.
        return {key: values[names[id(value)]] for key, value in self.module.state_dict(keep_vars=True).items()}


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
            known = f"{', '.join(MODELS)}, torchvision:NAME or package.module:function"
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
    if name.startswith(vision.PREFIX):
        module, notes = vision.torchvision_model(name, classes, image_shape[2])
    else:
        function = load_object("--model", name, "package.module:function")
        with users_code(f"--model {name}", "a function of (classes, image_shape) that returns an nn.Module"):
            own = isinstance(function, nn.Module)
            module = copy.deepcopy(function) if own else function(classes, image_shape)
    wanted = norm or (vision.NORM if name.startswith(vision.PREFIX) else "")
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
