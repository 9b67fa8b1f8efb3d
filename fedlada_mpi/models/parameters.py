"""The parameters and buffers of a module by name, its outputs with others in their place, and which cannot be trained.

A run holds the parameters of all clients in flat vectors, and calls a module with their values in place of its own.
What a module ties to its own ``nn.Parameter`` objects, such as hooks or shared memory, would be left behind, so it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain, combinations
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..support.errors import UserError
from .form import Form, Stored

T = TypeVar("T")


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that a run trains, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def dense(gradient: Tensor) -> Tensor:
    """A gradient that layers may give as the rows that are not zero."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def names_by_id(module: nn.Module) -> dict[int, str]:
    """The name in ``tensors`` of every parameter and buffer; one that several layers share has a single name."""
    return {id(value): name for name, value in tensors(module).items()}


def dtype_of(module: nn.Module) -> torch.dtype:
    """The type of a module's numbers, in which it takes images."""
    return next((t.dtype for t in module.parameters() if t.is_floating_point()), torch.float32)


def in_type(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with all its numbers in one type, as a run computes; ``Module.to`` would cut complex ones."""
    for value in tensors(module).values():
        if value.is_floating_point():
            value.data = value.data.to(dtype)
    return module


def tied(module: nn.Module) -> dict[str, str]:
    """Further names of tensors that several layers share, each with the tensor's name in ``tensors``."""
    names = names_by_id(module)
    return {
        name: names[id(value)]
        for prefix, layer in module.named_modules()
        for attribute, value in (*layer._parameters.items(), *layer._buffers.items())
        if value is not None and (name := f"{prefix}.{attribute}".lstrip(".")) != names[id(value)]
    }


def outputs_with(
    module: nn.Module, values: Mapping[str, Tensor], tied: Mapping[str, str], form: Form, stored: Stored
) -> Tensor:
    """Of a user's module with ``values`` in place of its tensors, on examples as they are stored."""
    every = {**values, **{name: values[first] for name, first in tied.items()}}
    # Where a whole layer is used twice, torch's own way of tying would leave these values in the module.
    outputs: Tensor = functional_call(module, every, *form.seen(stored), tie_weights=False)
    return outputs


def while_holding(
    module: nn.Module, values: Mapping[str, Tensor], tied: Mapping[str, str], action: Callable[[], T]
) -> T:
    """What ``action`` gives while a module has ``values`` in place of its tensors.

    A backward pass may read them from the module, too: checkpointing does, and so do functions and hooks of users.
    """
    every = {**values, **{name: values[first] for name, first in tied.items()}}
    found: T = functional_call(
        _Caller(module), {f"module.{name}": value for name, value in every.items()}, (action,), tie_weights=False
    )
    return found


class _Caller(nn.Module):
    """Calls what it is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, action: Callable[[], T]) -> T:
        return action()


def refuse_untrainable(model: str, module: nn.Module) -> None:
    """Raise ``UserError`` where parameters cannot be held in flat vectors."""
    for name, value in trained(module).items():
        if not value.is_floating_point():
            raise UserError(
                f"--model {model}: got {name} of type {str(value.dtype).removeprefix('torch.')}, expected parameters "
                "of real floating-point numbers: use two of them, torch.view_as_complex(...) in forward, or "
                "requires_grad_(False)"
            )
        if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
            raise UserError(
                f"--model {model}: {name} has a hook on its gradient, which a run would not call: leave it out, and "
                "use --clip, a method of your own, or a hook on the layer (register_full_backward_hook)"
            )
    _refuse_shared_memory(model, module)


def _refuse_shared_memory(model: str, module: nn.Module) -> None:
    """As where one parameter is a view of another: a run would train both, each for itself."""
    own, by_storage = trained(module), dict[int, list[str]]()
    every = tensors(module)
    for name, value in every.items():
        if value.numel():
            by_storage.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    for name, other in chain.from_iterable(combinations(names, 2) for names in by_storage.values()):
        if (name in own or other in own) and _overlap(every[name], every[other]):
            raise UserError(
                f"--model {model}: {name} and {other} share their memory: expected tensors of their own, or one "
                "nn.Parameter that both layers have"
            )
    for name, value in own.items():
        if any(length > 1 and not stride for length, stride in zip(value.shape, value.stride(), strict=True)):
            raise UserError(f"--model {model}: elements of {name} share their memory: make it a copy (.clone())")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if max(a.storage_offset(), b.storage_offset()) > min(_last(a), _last(b)):
        return False
    return bool(torch.isin(_elements(a), _elements(b)).any())


def _last(value: Tensor) -> int:
    """The place of its last element in its storage."""
    steps = zip(value.shape, value.stride(), strict=True)
    return int(value.storage_offset() + sum((length - 1) * stride for length, stride in steps))


def _elements(value: Tensor) -> Tensor:
    """The places of its elements in its storage."""
    return torch.arange(_last(value) + 1).as_strided(value.shape, value.stride(), value.storage_offset()).flatten()
