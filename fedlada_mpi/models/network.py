"""A model as the engines see it: a module, its flat layout, and its stacked forward where it could be traced."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..support.randomness import Draws
from .form import Form
from .layout import Layout
from .lora import Lora, adapters
from .parameters import names_by_id
from .stack import Stack
from .translate import Traced
from .work import multiply_adds


@dataclass
class Network:
    """A plain module, its flat layout and, where it could be traced, the stacked forward.

    >>> from fedlada_mpi.models import build
    >>> network = build("cnn", outputs=10, inputs=(8, 8, 1))
    >>> network.layout.numel, network.untraceable_because
    (9930, '')
    >>> x = network.initial()
    >>> network.state_dict(x)["fc.weight"].shape
    torch.Size([10, 512])
    """

    name: str
    module: nn.Module
    form: Form  # of its inputs
    layout: Layout  # of the parameters that are trained
    forward: Traced | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)  # frozen parameters and buffers
    draws: bool = False  # whether stacked layers draw random numbers in training
    untraceable_because: str = ""  # why there is no stacked forward
    lora: Lora | None = None  # whose adapters the module has
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
        """Multiply-adds of a forward pass over one example."""
        return multiply_adds(self.module, self.form)

    def activation_bytes(self, examples: int, dtype: torch.dtype, on_gpu: bool = False) -> int:
        """What the stacked forward saves for the backward pass, and the largest columns once more; 0 where unknown."""
        assert self.forward is not None
        values, alive, example = torch.zeros(1, self.layout.live), list[Tensor](), self.form.zeros(1, 1)
        stack = self.stack(values, values)
        stack.on_gpu = on_gpu
        if self.draws:
            stack.draws = Draws(torch.zeros(1, dtype=torch.int64), stacked=True)
        saved: dict[int, int] = {}
        own = {value.untyped_storage().data_ptr() for value in stack.value.values()}

        def save(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # or the next one could get its address

        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
                self.forward(stack, example)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            return 0  # torch 2.4 has no such hooks under vmap
        # Layers keep what ``save`` returns, and ``save`` itself: a tensor that leads back to them is never freed.
        alive.clear()
        return (sum(saved.values()) + max(saved.values())) * examples * dtype.itemsize // values.element_size()

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

    @cached_property
    def _base(self) -> str:
        """The digest of what adapters belong to, which takes a while."""
        return self.digest()

    def saved(self, x: Tensor) -> dict[str, Any]:
        """What a run writes of the parameters in ``x``: a state_dict, or adapters and what they belong to."""
        if self.lora is None:
            return self.state_dict(x)
        parameters = self.layout.unpack(x)
        fixed = {name: self.constants[name].cpu() for name in sorted(adapters(self.module)) if name in self.constants}
        return {"lora": self.lora.record(), "base": self._base, "state_dict": {**parameters, **fixed}}

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        """What the module's ``load_state_dict`` takes: the parameters in ``x``, and the constants."""
        values = {name: value.cpu() for name, value in self.constants.items()} | self.layout.unpack(x)
        names = names_by_id(self.module)
        # A tensor that several layers share has a name in each of them.
        return {key: values[names[id(value)]] for key, value in self.module.state_dict(keep_vars=True).items()}
