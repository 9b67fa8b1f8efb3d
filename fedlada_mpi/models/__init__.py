"""Models by name: built-in (``built_in``), ``torchvision:NAME``, ``hf:FOLDER``, or one's own ``module:function``.

A user's function takes ``(outputs, shape)``, the number of outputs (classes) and the shape of an example, for images
(rows, columns, channels); or a single argument, the data's ``tasks.About``. It returns an ``nn.Module``, which gets
images as [N, channels, rows, columns] and other arrays as they are stored. From Python, a module may be given itself;
the run has a copy, which starts from its values. Like the built-in models it is put onto the stacked layers
(``translate.py``); one that cannot be trains on the generic path (functional torch), which is slower. Frozen parameters
and buffers are constants: neither trained nor sent.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from ..settings import Config
from ..support.errors import UserError, shortened
from ..support.fast_path import without_fast_path
from ..support.rng import torch_seeded
from ..support.suggestions import did_you_mean
from ..support.user_code import HUGGING_FACE, TORCHVISION, load_object, users_code
from ..tasks.base import About, Array
from . import norms, vision
from .agreement import disagreement
from .architectures import Activation, MakeActivation, causal_cnn, cnn, fcn, lenet, lenet3, linear, mlp, resnet18
from .dry_run import dry_run
from .form import Form
from .hugging_face import HuggingFace, hf_model, short_rows
from .layout import Layout
from .lora import Lora, refuse_unused
from .network import Network
from .parameters import tensors
from .recurrent_dropout import draw_by_example
from .sequences import gpt, lstm, vit_tiny
from .tracing import NotTraceable
from .translate import translate

__all__ = ["OF_ARRAYS", "OF_IMAGES", "Lora", "Network", "build", "built_in"]

ImageShape: TypeAlias = tuple[int, int, int]  # rows, columns, channels
Outputs: TypeAlias = "int | tuple[int, ...] | None"  # of a model for one example; None: any

OF_IMAGES: dict[str, Callable[[int, ImageShape, MakeActivation], nn.Module]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "lenet3": lenet3,
    "cnn": cnn,
    "vit_tiny": vit_tiny,
}
OF_ARRAYS: dict[str, Callable[[tuple[int, ...], Form, MakeActivation], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "fcn": fcn,
    "causal_cnn": causal_cnn,
    "gpt": gpt,
    "lstm": lstm,
}


def built_in() -> tuple[str, ...]:
    """The names of the built-in models."""
    return (*OF_IMAGES, *OF_ARRAYS)


def build(
    name: str,
    outputs: Outputs,
    inputs: ImageShape | About,
    activation: str = "relu",
    seed: int = 0,
    stacked: bool = True,
    norm: str = "",
    smu_mu: float = Config.smu_mu,
    lora: Lora | None = None,
) -> Network:
    """The network ``name`` with so many outputs, initialised from ``seed`` alone; a shape is that of an image.

    ``lora``: with adapters, which alone are trained.
    """
    form, shape = Form.of(inputs), (outputs,) if isinstance(outputs, int) else outputs
    with torch_seeded(seed), without_fast_path():
        notes: list[str] = []
        if ":" in name:
            module, notes = _by_name(name, shape, form, inputs, norm)
            if lora and isinstance(module, nn.Module):
                fresh = module.fresh if isinstance(module, HuggingFace) else ()
                notes.append(lora.attach(name, module, seed, fresh))
                refuse_unused(name, module, form)
            tried = short_rows(shape, form) if shape and name.startswith(HUGGING_FACE) else (shape, form)
            module = dry_run(name, module, *tried)
        elif name in built_in():
            try:
                module = _built_in(name, shape, form, partial(Activation, activation, smu_mu))
            except ValueError as error:
                raise UserError(f"--model {name}: {error}") from None
            if lora:
                notes.append(lora.attach(name, module, seed))
        else:
            names = ", ".join(built_in())
            known = f"{names}, torchvision:NAME, hf:FOLDER, package.module:function or path/file.py:function"
            raise UserError(f"--model: got {shortened(name)}, expected one of {known}{did_you_mean(name, built_in())}")
        network = _generic(name, module, form, notes)
        network.lora = lora
        if not stacked:
            return network
        try:
            return _stacked(network, users_own=name not in built_in() or lora is not None)
        except NotTraceable as error:
            network.untraceable_because = str(error)
            return network


def _built_in(name: str, outputs: tuple[int, ...] | None, form: Form, activation: MakeActivation) -> nn.Module:
    if outputs is None:
        raise ValueError("the task says no shape of outputs: give a model of your own, or Task.outputs")
    if name in OF_ARRAYS:
        return OF_ARRAYS[name](outputs, form, activation)
    if not form.image or len(outputs) != 1:
        raise ValueError(
            f"it turns images into one number per class, got {form.seen_shape}: use {', '.join(OF_ARRAYS)}"
        )
    assert isinstance(form.arrays, Array)
    rows, columns, channels = form.arrays.shape
    return OF_IMAGES[name](outputs[0], (rows, columns, channels), activation)


def _generic(name: str, module: nn.Module, form: Form, notes: list[str]) -> Network:
    parameters = [(n, p.shape) for n, p in module.named_parameters() if p.requires_grad]
    trained = {n for n, _ in parameters}
    constants = {n: t.detach() for n, t in tensors(module).items() if n not in trained}
    return Network(name, module, form, Layout(parameters), constants=constants, notes=notes)


def _by_name(
    name: str, outputs: tuple[int, ...] | None, form: Form, inputs: ImageShape | About, norm: str
) -> tuple[Any, list[str]]:
    """A model from elsewhere, or a user's own, with its BatchNorm layers exchanged, and what is to be said of it."""
    notes: list[str] = []
    if name.startswith(TORCHVISION):
        if not form.image or outputs is None or len(outputs) != 1:
            raise UserError(f"--model {name} classifies images, got {form.seen_shape}: give a model of your own")
        assert isinstance(form.arrays, Array)
        module, notes = vision.torchvision_model(name, outputs[0], form.arrays.shape[2])
    elif name.startswith(HUGGING_FACE):
        module, notes = hf_model(name, outputs, form)
    else:
        function = load_object("--model", name, "package.module:function or path/file.py:function")
        with users_code(f"--model {name}", "a function of (outputs, shape) that returns an nn.Module"):
            own = isinstance(function, nn.Module)
            module = copy.deepcopy(function) if own else _made(function, outputs, form, inputs)
    wanted = norm or (vision.NORM if name.startswith(TORCHVISION) else "")
    if wanted and isinstance(module, nn.Module):
        count = norms.exchange(name, module, wanted)
        if count:
            notes.append(f"{count} BatchNorm layer{'s' * (count > 1)} exchanged, --norm {wanted}")
        elif norm:
            raise UserError(f"--norm {norm}: {name} has no BatchNorm to exchange: leave it out")
    if isinstance(module, nn.Module):
        draw_by_example(module)
    return module, notes


def _made(function: Callable[..., Any], outputs: tuple[int, ...] | None, form: Form, inputs: ImageShape | About) -> Any:
    """The module of a user's function: of what there is to know, where it takes one argument."""
    if _takes_one(function):
        about = inputs if isinstance(inputs, About) else About(form.arrays, classes=(outputs or (0,))[0], image=True)
        return function(replace(about, outputs=outputs))
    if form.single is None:
        raise UserError(f"--model: its inputs are {form.seen_shape}: expected a function of one argument, about")
    number = outputs[0] if outputs is not None and len(outputs) == 1 else outputs
    return function(number, form.single.shape)


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument, and not with two."""
    try:
        signature = inspect.signature(function)
        signature.bind(None)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(None, None)
    except TypeError:
        return True
    return False


def _stacked(network: Network, users_own: bool) -> Network:
    """The network with a stacked forward; a user's own is compared with the plain module."""
    parameters, found = [(e.name, e.shape) for e in network.layout.entries], ""
    for general in (True, False):  # a single operation may have arguments that only vmap takes
        try:
            traced = translate(network.module, network.form, general)
        except NotTraceable:
            if found:
                break
            raise
        layout = Layout(parameters, traced.kernels, traced.dead, traced.groups)
        stacked = replace(network, layout=layout, forward=traced)
        differs = disagreement(stacked) if users_own else ""
        if not differs:
            return stacked
        found = found or differs
    raise NotTraceable(found)
