"""Models by name: ``resnet18``, ``lenet``, ``cnn``, or a user's own ``package.module:function``.

A user's function takes ``(classes, image_shape)`` and returns an ``nn.Module`` with an ordinary NCHW
forward; it trains on the generic path (functional torch), slower than the stacked one.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..errors import UserError, did_you_mean, shortened
from .architectures import Architecture, cnn, lenet, resnet18
from .layers import Stack
from .layout import Kernel, Layout

ImageShape: TypeAlias = tuple[int, int, int]  # rows, columns, channels

MODELS: dict[str, Callable[[int, ImageShape, str], Architecture]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "cnn": cnn,
}


@dataclass
class Network:
    """A plain module, its flat layout and, where there is one, the stacked forward."""

    module: nn.Module
    layout: Layout
    forward: Callable[[Stack, Tensor], Tensor] | None

    def activation_bytes(self, image_shape: tuple[int, ...], images: int, dtype: torch.dtype) -> int:
        """What the stacked forward saves for the backward pass, and the largest columns once more."""
        assert self.forward is not None
        values, alive = torch.zeros(1, self.layout.live), []
        saved: dict[int, int] = {}
        own = values.untyped_storage().data_ptr()

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() != own:
                saved[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # or the next one could get its address
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            self.forward(Stack(self.layout, values, values), torch.zeros(1, 1, *image_shape))
        return (sum(saved.values()) + max(saved.values())) * images * dtype.itemsize // values.element_size()

    def initial(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The module's own parameters as a flat vector."""
        return self.layout.pack(dict(self.module.named_parameters()), dtype)


def build(
    name: str,
    classes: int,
    image_shape: ImageShape,
    activation: str = "relu",
    seed: int = 0,
    stacked: bool = True,
) -> Network:
    """The network ``name`` for images [H, W, C], initialised from ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        forward: Callable[[Stack, Tensor], Tensor] | None = None
        maps: dict[str, Kernel] = {}
        if ":" in name:
            module = _own(name)(classes, image_shape)
        elif name in MODELS:
            try:
                module, forward, maps = MODELS[name](classes, image_shape, activation)
            except ValueError as error:
                raise UserError(f"--model {name}: {error}") from None
        else:
            known = f"{', '.join(MODELS)}, or package.module:function"
            raise UserError(f"--model: got {shortened(name)}, expected one of {known}{did_you_mean(name, MODELS)}")
    changing = [n for n, _ in module.named_buffers()]
    if changing:
        raise UserError(
            f"--model {name} has buffers ({', '.join(changing[:3])}): layers that change them in training, such as "
            "BatchNorm, have no federated mean; use GroupNorm or LayerNorm"
        )
    parameters = [(n, p.shape) for n, p in module.named_parameters()]
    if not stacked or forward is None:
        return Network(module, Layout(parameters), None)
    kernels = {n: _kernel(s) for n, s in parameters if len(s) > 1} | maps
    layout = Layout(parameters, kernels)
    seen = Stack(layout, torch.zeros(1, layout.size))
    with torch.no_grad():
        forward(seen, torch.zeros(1, 1, *image_shape))
    dead = {name: window.dead for name, window in seen.windows.items() if window.dead}
    return Network(module, Layout(parameters, kernels, dead), forward)


def _kernel(shape: torch.Size) -> Kernel:
    """A convolution's weights as they are, a linear layer's as a 1x1 kernel."""
    out, channels, *size = shape
    height, width = size or (1, 1)
    return out, channels, height, width


def _own(name: str) -> Callable[[int, ImageShape], nn.Module]:
    """A user's function, also from a file in the working directory; whatever it raises ends the run with its place."""
    place, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*place.split("."), *function.split("."))):
        raise UserError(f"--model: got {shortened(name)}, expected package.module:function")

    def build_own(classes: int, image_shape: ImageShape) -> nn.Module:
        sys.path.insert(0, os.getcwd())
        try:
            module = attrgetter(function)(importlib.import_module(place))(classes, image_shape)
        except (Exception, SystemExit) as error:
            raise UserError(f"--model {name}: {_where(error)}") from error
        finally:
            sys.path.pop(0)
        if not isinstance(module, nn.Module):
            raise UserError(f"--model {name}: got {shortened(module)}, expected a function that returns an nn.Module")
        if next(module.parameters(), None) is None:
            raise UserError(f"--model {name}: got a module without parameters, expected one that can be trained")
        return module

    return build_own


def _where(error: BaseException) -> str:
    """An exception of a user's code in one line, with the place that raised it."""
    what = f"{type(error).__name__}: {error}"
    ours = (__file__, importlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and f.filename[0] != "<"]
    if not frames:
        return f"{what}; expected package.module:function, which takes (classes, image_shape)"
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    last = next((f for f in reversed(frames) if not f.filename.startswith(libraries)), frames[-1])
    return f"{what} ({last.filename}, line {last.lineno}: {last.line})"
