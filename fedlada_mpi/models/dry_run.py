"""A user's model tried on one batch, before a run writes anything: what cannot train is refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..support.errors import UserError, shortened
from ..support.randomness import Draws
from ..support.user_code import users_code
from .norms import has_batch_norm

IMAGES = 2


def dry_run(model: str, module: object, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """The module, if it turns images [N, channels, rows, columns] into [N, classes], each by itself."""
    if not isinstance(module, nn.Module):
        raise UserError(f"--model {model}: got {shortened(module)} from the function, expected an nn.Module")
    module.cpu()
    rows, columns, channels = image_shape
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, channels, rows, columns, generator=draw)
    other = torch.cat((images[:1], torch.randn(IMAGES - 1, channels, rows, columns, generator=draw)))
    # Also gives lazy layers their shapes and initial values.
    _check_outputs(model, _outputs(model, module.eval(), images, None), classes)
    if not any(p.requires_grad for p in module.parameters()):
        raise UserError(f"--model {model} has nothing to train: expected parameters with requires_grad")
    before = {name: value.detach().clone() for name, value in tensors(module).items()}
    _refuse_random_evaluation(model, module, images)
    trained = _outputs(model, module.train(), images, _same_draws())
    _check_outputs(model, trained, classes)
    changed = [n for n, value in tensors(module).items() if not _same(value, before[n])]
    if changed:
        raise UserError(
            f"--model {model} changes {', '.join(changed[:3])} in its forward pass: layers with running statistics, "
            f"such as BatchNorm, have no federated mean; {_instead(module)}"
        )
    if not _close(trained, _outputs(model, module, images, _same_draws())):
        raise UserError(
            f"--model {model}: two passes over the same batch differ; layers must not keep state, and must draw random "
            "numbers with torch, not with random or numpy"
        )
    # Batches are padded, so that those of all clients have one size.
    if not _close(trained[0], _outputs(model, module, other, _same_draws())[0]):
        raise UserError(
            f"--model {model}: the outputs of an image depend on the other images of its batch, as with BatchNorm; "
            f"{_instead(module)}"
        )
    return module


def outputs_with(module: nn.Module, values: Mapping[str, Tensor], tied: Mapping[str, str], images: Tensor) -> Tensor:
    """Of a user's module with ``values`` in place of its tensors, on images [N, rows, columns, channels]."""
    every = {**values, **{name: values[first] for name, first in tied.items()}}
    seen = images.permute(0, 3, 1, 2).contiguous()  # many modules use ``view``
    # Where a whole layer is used twice, torch's own way of tying would leave these values in the module.
    outputs: Tensor = functional_call(module, every, (seen,), tie_weights=False)
    return outputs


def _instead(module: nn.Module) -> str:
    """What to use in place of BatchNorm."""
    exchange = ", or give --norm group:2" if has_batch_norm(module) else ""
    return f"use GroupNorm or LayerNorm{exchange}"


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def names_by_id(module: nn.Module) -> dict[int, str]:
    """The name in ``tensors`` of every parameter and buffer; one that several layers share has a single name."""
    return {id(value): name for name, value in tensors(module).items()}


def dtype_of(module: nn.Module) -> torch.dtype:
    """The type of a module's numbers, in which it takes images."""
    return next((t.dtype for t in module.parameters() if t.is_floating_point()), torch.float32)


def tied(module: nn.Module) -> dict[str, str]:
    """Further names of tensors that several layers share, each with the tensor's name in ``tensors``."""
    names = names_by_id(module)
    return {
        name: names[id(value)]
        for prefix, layer in module.named_modules()
        for attribute, value in (*layer._parameters.items(), *layer._buffers.items())
        if value is not None and (name := f"{prefix}.{attribute}".lstrip(".")) != names[id(value)]
    }


def _refuse_random_evaluation(model: str, module: nn.Module, images: Tensor) -> None:
    draws = _same_draws()
    _outputs(model, module, images, draws)
    if draws.count:
        raise UserError(f"--model {model} draws random numbers in evaluation; F.dropout needs training=self.training")


def _same_draws() -> Draws:
    return Draws(torch.zeros(1, dtype=torch.int64), stacked=False)


def _outputs(model: str, module: nn.Module, images: Tensor, draws: Draws | None) -> Tensor:
    """Of a forward pass, which draws these random numbers."""
    expected = f"a model that takes images {list(images.shape[1:])}"
    with torch.no_grad(), users_code(f"--model {model}", expected), draws or nullcontext():
        return module(images.to(dtype_of(module)))


def _check_outputs(model: str, outputs: object, classes: int) -> None:
    if not isinstance(outputs, Tensor):
        raise UserError(f"--model {model}: got a {type(outputs).__name__} from its forward pass, expected a tensor")
    if tuple(outputs.shape) != (IMAGES, classes):
        got = list(outputs.shape)
        raise UserError(
            f"--model {model}: got outputs of shape {got} for {IMAGES} images, expected {[IMAGES, classes]}: "
            f"one for each of the {classes} classes"
        )
    if not outputs.is_floating_point():
        raise UserError(f"--model {model}: got outputs of type {outputs.dtype}, expected floating-point numbers")
    if not outputs.isfinite().all():
        raise UserError(f"--model {model}: its outputs are not finite before any training; check its initial values")
