"""``--lora``: low-rank adapters on the linear layers of a model, whose own parameters are frozen.

    y = W x + (alpha / r) B A x        A [r, inputs] drawn as a linear layer's weights are, B [outputs, r] zero

A layer keeps its name, its parameters and what it is an instance of; it gets ``lora_a`` and ``lora_b`` beside them. So
files of base weights fit as they are, and a merged model is again one of the user's class.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear  # of attention, which does not call it
from torch.nn.parameter import UninitializedParameter

from ..support.errors import UserError, shortened, some
from ..support.rng import ADAPTERS, bits
from ..support.user_code import users_code
from . import low_rank
from .form import Form
from .parameters import dtype_of

NAMES = ("lora_a", "lora_b")


class _Adapted(nn.Module):
    """What an adapted layer has in addition to being a layer of its kind."""

    weight: nn.Parameter
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float
    bias: nn.Parameter | None
    own_forward: bool  # where it is a user's, and may do more than the product

    def forward(self, x: Tensor) -> Tensor:
        if type(self).own_forward:
            return super().forward(x) + self.lora_scale * F.linear(F.linear(x, self.lora_a), self.lora_b)
        adapter = (self.lora_a, self.lora_b, self.lora_scale)
        return low_rank.adapted(x, self.weight, self.bias, *adapter, not isinstance(self, nn.Linear))


@cache
def _adapted(kind: Any) -> type[nn.Module]:
    own_forward = issubclass(kind, nn.Linear) and kind.forward is not nn.Linear.forward
    return type(f"Adapted{kind.__name__}", (_Adapted, kind), {"plain": kind, "own_forward": own_forward})


@dataclass(frozen=True)
class Lora:
    """The settings of adapters.

    >>> module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> Lora(rank=2, on="0").attach("mine", module, seed=0)
    'LoRA of rank 2, alpha 16, on 1 layer (0): 14 parameters trained, 23 frozen'
    >>> [name for name, p in module.named_parameters() if p.requires_grad]
    ['0.lora_a', '0.lora_b']
    """

    rank: int
    on: str = ""  # a regular expression of layers' names; "": all whose weights they alone use
    alpha: float = 16.0
    fixed_a: bool = False  # A stays as it was drawn
    train: str = ""  # a regular expression of parameters' names that are trained as well

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Lora | None:
        """As ``--lora`` says; None without it, as in the records of earlier versions."""
        if not settings.get("lora"):
            return None
        return cls(settings["lora"], *(settings[f"lora_{name}"] for name in ("on", "alpha", "fixed_a", "train")))

    def attach(self, model: str, module: nn.Module, seed: int, fresh: Collection[str] = ()) -> str:
        """Give a module's layers adapters, and freeze all else but what ``train`` and ``fresh`` name; returns a note.

        ``fresh``: parameters that have no values of a trained model yet, such as a new head.
        """
        chosen = self._chosen(model, module, fresh)
        layers = self._layers(model, module, chosen)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(name in chosen)
        draw = torch.Generator().manual_seed(int(bits(1, seed, ADAPTERS, 0)[0]))
        for layer in layers.values():
            self._adapt(layer, draw)
        return self._note(module, layers, chosen)

    def _chosen(self, model: str, module: nn.Module, fresh: Collection[str]) -> set[str]:
        """All names of the parameters that are trained besides the adapters."""
        named = dict(module.named_parameters(remove_duplicate=False))
        asked = {name for name in named if self.train and re.search(self.train, name)}
        if self.train and not asked:
            raise UserError(
                f"--lora-train: {shortened(self.train)} matches no parameter of {model}, which has {some(named)}"
            )
        wanted = {id(named[name]) for name in {*asked, *fresh} if name in named}
        return {name for name, parameter in named.items() if id(parameter) in wanted}

    def _layers(self, model: str, module: nn.Module, chosen: Collection[str]) -> dict[str, nn.Module]:
        known = {name: layer for name, layer in module.named_modules() if _is_linear(layer)}
        if not known:
            raise UserError(f"--lora: {model} has no linear layers, to which adapters could be added: leave it out")
        uses = _uses(module)
        free = {name: layer for name, layer in known.items() if f"{name}.weight".lstrip(".") not in chosen}
        if not self.on:
            found = {
                name: layer
                for name, layer in free.items()
                if uses.get(id(layer.weight)) == 1 and not isinstance(layer, NonDynamicallyQuantizableLinear)
            }
        else:
            found = {name: layer for name, layer in free.items() if re.search(self.on, name)}
        if not found and free and self.on:
            raise UserError(
                f"--lora-on: {shortened(self.on)} matches no linear layer of {model}, which has {some(free)}"
            )
        if not found:
            raise UserError(
                f"--lora: no linear layer of {model} is left for adapters: {some(known)} share their weights, or are "
                "trained as they are"
            )
        for name, layer in found.items():
            _refuse(f"--lora-on: {name} of {model}", layer, uses)
        return found

    def _adapt(self, layer: nn.Module, draw: torch.Generator) -> None:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        outputs, inputs = weight.shape if isinstance(layer, nn.Linear) else reversed(weight.shape)
        bound = 1 / math.sqrt(inputs)  # Kaiming's uniform one with a = sqrt(5)
        a = torch.empty(self.rank, inputs).uniform_(-bound, bound, generator=draw)
        layer.lora_a = nn.Parameter(a.to(weight.dtype), requires_grad=not self.fixed_a)
        layer.lora_b = nn.Parameter(torch.zeros(outputs, self.rank, dtype=weight.dtype))
        layer.lora_scale = self.alpha / self.rank  # type: ignore[assignment]
        kind: Any = type(layer)
        layer.__class__ = _adapted(kind)

    def _note(self, module: nn.Module, layers: Mapping[str, nn.Module], chosen: Collection[str]) -> str:
        trained = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
        frozen = sum(p.numel() for p in module.parameters()) - sum(trained.values())
        others = [name for name in trained if name in chosen]
        larger = [name for name, layer in layers.items() if self.rank > min(layer.weight.shape)]  # type: ignore[arg-type]
        return (
            f"LoRA of rank {self.rank}, alpha {self.alpha:g}, on {len(layers)} layer{'s' * (len(layers) > 1)} "
            f"({some(layers)}){', A fixed' * self.fixed_a}: {sum(trained.values()):,} parameters trained, "
            f"{frozen:,} frozen"
            + (f"; trained as they are: {some(others)}" if others else "")
            + (f"; the rank is more than the weights have of {some(larger)}" if larger else "")
        )

    def record(self) -> dict[str, Any]:
        """Next to the adapters in a file."""
        return asdict(self)


def refuse_unused(model: str, module: nn.Module, form: Form) -> None:
    """Raise ``UserError`` where the module takes the weights of an adapted layer without calling the layer."""
    adapters = {name: p for name, p in module.named_parameters() if name.endswith(NAMES[1])}
    arguments, named = form.seen(form.zeros(2, dtype=dtype_of(module)))
    with torch.enable_grad(), users_code(f"--model {model}", f"a model that takes {form.seen_shape}"):
        outputs = module.cpu().eval()(*arguments, **named)
        if not isinstance(outputs, Tensor):
            return  # which the dry run refuses
        gradients: Sequence[Tensor | None] = [None] * len(adapters)
        if outputs.requires_grad:
            gradients = torch.autograd.grad(outputs.sum(), [*adapters.values()], allow_unused=True)
    unused = [name.rpartition(".")[0] for name, g in zip(adapters, gradients, strict=True) if g is None]
    if unused:
        raise UserError(
            f"--lora-on: {unused[0]} of {model} is not called, so that an adapter would have no effect: as in "
            "nn.MultiheadAttention, its weights are taken from it; leave it out of the pattern"
        )


def merged(module: nn.Module) -> nn.Module:
    """The module, whose layers have W + (alpha / r) B A as their weights and no adapters."""
    for layer in module.modules():
        if isinstance(layer, _Adapted):
            a, b = layer.lora_a.detach().double(), layer.lora_b.detach().double()
            change = layer.lora_scale * (b @ a)
            weight = layer.weight.detach()
            change = change if isinstance(layer, nn.Linear) else change.t()
            layer.weight.data = (weight.double() + change).to(weight.dtype)
            for name in (*NAMES, "lora_scale"):
                delattr(layer, name)
            layer.__class__ = type(layer).plain  # type: ignore[attr-defined]
    return module


def adapters(module: nn.Module) -> set[str]:
    """The names of what adapters have added to a module."""
    return {
        f"{name}.{own}".lstrip(".")
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, _Adapted)
        for own in NAMES
    }


def _is_linear(layer: nn.Module) -> bool:
    """``nn.Linear``, or what GPT-2 of transformers has in its place, with [inputs, outputs] as weights."""
    named = f"{type(layer).__module__}.{type(layer).__name__}"
    return isinstance(layer, nn.Linear) or named == "transformers.pytorch_utils.Conv1D"


def _uses(module: nn.Module) -> dict[int, int]:
    """In how many layers every parameter is."""
    count: dict[int, int] = {}
    for layer in module.modules():
        for parameter in layer._parameters.values():
            count[id(parameter)] = count.get(id(parameter), 0) + 1
    return count


def _refuse(what: str, layer: nn.Module, uses: Mapping[int, int]) -> None:
    weight = layer._parameters.get("weight")
    if isinstance(weight, UninitializedParameter):
        raise UserError(f"{what} has no sizes yet: expected nn.Linear(inputs, outputs) in place of a lazy layer")
    if weight is None or not weight.is_floating_point():
        raise UserError(f"{what} has no weights of its own: expected a plain linear layer, without a parametrisation")
    if uses[id(weight)] > 1:
        raise UserError(
            f"{what} shares its weights with another layer, which an adapter cannot be merged into: leave it out of "
            "the pattern"
        )
