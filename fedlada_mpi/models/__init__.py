"""Models by name: ``resnet18``, ``lenet``, ``cnn``, or a user's own ``package.module:function``.

A user's function takes ``(classes, image_shape)``, with ``image_shape`` (rows, columns, channels), and returns an
``nn.Module`` with an ordinary NCHW forward; it trains on the generic path (functional torch), slower than the stacked
one. From Python, a module may be given itself; the run has a copy, which starts from its values. Frozen parameters and
buffers are constants: neither trained nor sent.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..errors import UserError, did_you_mean, shortened
from ..own import load_object, users_code
from ..rng import torch_seeded
from .architectures import Architecture, cnn, lenet, resnet18
from .layers import Stack
from .layout import Kernel, Layout
from .trial import tensors, try_out

ImageShape: TypeAlias = tuple[int, int, int]  # rows, columns, channels

MODELS: dict[str, Callable[[int, ImageShape, str], Architecture]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "cnn": cnn,
}


@dataclass
class Network:
    """A plain module, its flat layout and, where there is one, the stacked forward."""

    name: str
    module: nn.Module
    image_shape: ImageShape
    layout: Layout  # of the parameters that are trained
    forward: Callable[[Stack, Tensor], Tensor] | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)  # frozen parameters and buffers

    def activation_bytes(self, image_shape: tuple[int, ...], images: int, dtype: torch.dtype) -> int:
        """What the stacked forward saves for the backward pass, and the largest columns once more."""
        assert self.forward is not None
        values, alive = torch.zeros(1, self.layout.live), []
        saved: dict[int, int] = {}
        own = values.untyped_storage().data_ptr()

        def save(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage.data_ptr() != own:
                saved[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # or the next one could get its address

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            self.forward(Stack(self.layout, values, values), torch.zeros(1, 1, *image_shape))
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
        names = {id(value): name for name, value in tensors(self.module).items()}
        # A tensor that several layers share has a name in each of them.
        return {key: values[names[id(value)]] for key, value in self.module.state_dict(keep_vars=True).items()}


def build(
    name: str,
    classes: int,
    image_shape: ImageShape,
    activation: str = "relu",
    seed: int = 0,
    stacked: bool = True,
) -> Network:
    """The network ``name`` for images [H, W, C], initialised from ``seed`` alone."""
    with torch_seeded(seed):
        forward: Callable[[Stack, Tensor], Tensor] | None = None
        maps: dict[str, Kernel] = {}
        if ":" in name:
            function = load_object("--model", name, "package.module:function")
            with users_code(f"--model {name}", "a function of (classes, image_shape) that returns an nn.Module"):
                own = isinstance(function, nn.Module)
                module = copy.deepcopy(function) if own else function(classes, image_shape)
            module = try_out(name, module, classes, image_shape)
        elif name in MODELS:
            try:
                module, forward, maps = MODELS[name](classes, image_shape, activation)
            except ValueError as error:
                raise UserError(f"--model {name}: {error}") from None
        else:
            known = f"{', '.join(MODELS)}, or package.module:function"
            raise UserError(f"--model: got {shortened(name)}, expected one of {known}{did_you_mean(name, MODELS)}")
    parameters = [(n, p.shape) for n, p in module.named_parameters() if p.requires_grad]
    if not stacked or forward is None:
        trained = {n for n, _ in parameters}
        constants = {n: t.detach().clone() for n, t in tensors(module).items() if n not in trained}
        return Network(name, module, image_shape, Layout(parameters), constants=constants)
    kernels = {n: _kernel(s) for n, s in parameters if len(s) > 1} | maps
    layout = Layout(parameters, kernels)
    seen = Stack(layout, torch.zeros(1, layout.size))
    with torch.no_grad():
        forward(seen, torch.zeros(1, 1, *image_shape))
    dead = {name: window.dead for name, window in seen.windows.items() if window.dead}
    return Network(name, module, image_shape, Layout(parameters, kernels, dead), forward)


def _kernel(shape: torch.Size) -> Kernel:
    """A convolution's weights as they are, a linear layer's as a 1x1 kernel."""
    out, channels, *size = shape
    height, width = size or (1, 1)
    return out, channels, height, width
