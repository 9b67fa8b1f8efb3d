"""Operations that become part of the step before them.

A product (convolution or linear layer) also applies the activation behind it, and a norm adds a residual and applies a
ReLU or ReLU6: one step, on a GPU one kernel, does the work of two or three. So a product or norm whose only user can be
such an operation waits for it; if it does not fit after all, the step is added without it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .axes import Axes
from .layers import ACTIVATIONS
from .program import Value
from .tracing import operation

ADDITIONS: set[Any] = {operator.add, operator.iadd, torch.add, "add", "add_"}
RELU: set[Any] = {F.relu, torch.relu, "relu", "relu_"}
FUSED_ACTIVATIONS = tuple(name for name in ACTIVATIONS if name)


def activation_of(node: fx.Node) -> str:
    """The name of a node's activation in ``layers.ACTIVATIONS``; "" if it is none of them."""
    function = operation(node)
    if function in RELU:
        return "relu"
    if function is F.relu6 or (function is F.hardtanh and _limits(*node.args, **node.kwargs) == (0, 6)):
        return "relu6"
    if function is F.silu and len(node.args) == 1:
        return "silu"
    if function is F.gelu and len(node.args) == 1:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(node.kwargs.get("approximate", "none")), "")
    return ""


def _limits(x: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: Any = False) -> tuple[Any, Any]:
    """Of ``F.hardtanh`` with these arguments."""
    return min_val, max_val


@dataclass
class FusableStep:
    """A step that can also add a residual, then apply an activation."""

    emit: Callable[[Value | None, str], Value]  # adds the step with this residual, or none, and this activation, or ""
    activations: Collection[str] = FUSED_ACTIVATIONS
    residual: Axes | None = None  # the axes that a residual must have; None: it cannot add one


class Fusion:
    """The values of a graph's nodes, and the steps that wait for the operation behind them."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.waiting: dict[fx.Node, FusableStep] = {}

    def value(self, node: fx.Node) -> Any:
        """What a node gave; a step that waits for another operation is added without it."""
        if node in self.waiting:
            self.values[node] = self.waiting.pop(node).emit(None, "")
        return self.values[node]

    def add(self, node: fx.Node, step: FusableStep) -> Value | None:
        """The value of the node's step; None if the step waits for the only user of the node."""
        if len(node.users) == 1:
            (user,) = node.users
            adds = step.residual is not None and operation(user) in ADDITIONS and not user.kwargs
            if adds or activation_of(user) in step.activations:
                self.waiting[node] = step
                return None
        return step.emit(None, "")

    def joins(self, node: fx.Node) -> bool:
        """Whether the node becomes part of the step before it, which gives its value now or waits once more."""
        return self._joins_as_residual(node) or self._joins_as_activation(node)

    def _joins_as_activation(self, node: fx.Node) -> bool:
        name, before = activation_of(node), node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or before not in self.waiting:
            return False
        if name not in self.waiting[before].activations:
            return False
        self.values[node] = self.waiting.pop(before).emit(None, name)
        return True

    def _joins_as_residual(self, node: fx.Node) -> bool:
        if operation(node) not in ADDITIONS or len(node.args) != 2 or node.kwargs:
            return False
        norm: Any
        norm, other = node.args if self._adds_residual(node.args[0]) else reversed(node.args)
        if not self._adds_residual(norm) or not isinstance(other, fx.Node) or other is norm:
            return False
        step, residual = self.waiting[norm], self.value(other)
        if not isinstance(residual, Value) or residual.kind != "batch" or residual.axes != step.residual:
            return False
        del self.waiting[norm]
        with_residual = FusableStep(lambda _, activation: step.emit(residual, activation), step.activations)
        value = self.add(node, with_residual)
        if value is not None:
            self.values[node] = value
        return True

    def _adds_residual(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and node in self.waiting and self.waiting[node].residual is not None
