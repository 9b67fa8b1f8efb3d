"""Any operation as a step on the tensors of all clients.

Where ``operations.py`` has no layer for an operation, ``client_axis.py`` may act on all clients at once. Values are
read as [C, ...] with the axes of the user's code; what depends on no client is computed once, as the user wrote it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from . import by_autograd, client_axis, vocabulary
from .axes import Axes
from .program import Builder, Value
from .stack import Stack
from .tracing import Graph, Shape, images_shape, operation

OF_CLIENTS = {"batch", "parameter", "any"}
RESHAPING: set[Any] = {torch.flatten, torch.reshape, torch.squeeze, torch.unflatten}
RESHAPING |= {"flatten", "reshape", "view", "squeeze", "unflatten", "view_as", "reshape_as"}
NEW = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")  # which are like a tensor in their type alone
ATTRIBUTES = ("shape", "dtype", "device", "ndim", "T", "mT")


def gives_large_outputs(node: fx.Node, weight: Any) -> bool:
    """Whether a linear layer is the last one, over a large vocabulary."""
    large = isinstance(weight, Value) and len(weight.shape) == 2 and weight.shape[0] >= vocabulary.LARGE
    return large and all(user.op == "output" for user in node.users)


def is_batch(value: Any) -> bool:
    return isinstance(value, Value) and value.kind == "batch"


def values_in(arguments: Any) -> list[Value]:
    """The values anywhere in the arguments of an operation."""
    found: list[Any] = []
    map_aggregate(arguments, found.append)
    return [argument for argument in found if isinstance(argument, Value)]


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in the arguments of an operation."""

    index: int  # among what the step reads


def filled(places: Any, held: Sequence[Any] | Mapping[int, Any]) -> Any:
    """The arguments of an operation, with what its step reads."""
    return map_aggregate(places, lambda v: held[v.index] if isinstance(v, _Place) else v)


class General(Builder):
    """Adds the steps of operations on tensors with an axis of clients."""

    def __init__(self, graph: Graph, at_once: bool):
        """``at_once``: for all clients, where there is a way; otherwise only what depends on no client has a step."""
        super().__init__(graph.form.names)
        self.graph, self.at_once = graph, at_once

    def general(self, node: fx.Node, arguments: Any, options: Any) -> Any:
        """The value of a node, or values; None if the operation has no such step."""
        function = operation(node)
        if function is None:
            return None
        if not any(value.kind in OF_CLIENTS for value in values_in((arguments, options))):
            return self.once(node, arguments, options)
        if not self.at_once:
            return None
        first = arguments[0] if arguments else None
        if function in RESHAPING:
            return self._reshaped(node, first) if isinstance(first, Value) else None
        if function in (getattr, "size", "dim", "numel", "__len__") and isinstance(first, Value):
            return self._attribute(node, first, *arguments[1:], **options)
        options = {name: value for name, value in options.items() if name != "inplace"}
        if function in NEW and isinstance(first, Value):
            return self._new(node, first, arguments[1:], options)
        if function is operator.getitem:
            return self._indexed(node, *arguments)
        run = client_axis.OPERATIONS.get(function) or by_autograd.LAYERS.get(function)
        value = None if run is None else self.step(node, run, arguments, options)
        if value is not None and run is by_autograd.linear and gives_large_outputs(node, arguments[1]):
            self.heads[value.slot] = self.steps[-1].reads
        return value

    def _new(self, node: fx.Node, like: Value, arguments: Any, options: Any) -> Value:
        """A tensor that is the same for all clients, of the type of ``like``."""
        (source,), _ = self.placed((like,))
        reads, places = self.placed((arguments, options), clients=False)

        def run(p: Stack, x: Tensor, *held: Any) -> Tensor:
            a, o = filled(places, held)
            tensor: Tensor = getattr(x, str(node.target))(*a, **o)
            return tensor

        first, second = (probe[node] for probe in self.graph.probes)
        return self._result(first, second, run, [source, *reads], reads)

    def step(self, node: fx.Node, function: Callable[..., Any], arguments: Any, options: Any) -> Any:
        """A function of tensors with an axis of clients."""
        reads, places = self.placed((arguments, options))

        def run(p: Stack, *held: Any) -> Any:
            a, o = filled(places, held)
            return function(*a, **o, kernels=p.kernels) if function in by_autograd.WITH_KERNELS else function(*a, **o)

        return self.results(node, run, reads)

    def placed(self, arguments: Any, clients: bool = True) -> tuple[list[Value], Any]:
        """What a step reads, with an axis of clients or, of constants, as it is; and its arguments without it."""
        reads: list[Value] = []

        def place(value: Any) -> Any:
            if not isinstance(value, Value):
                return value
            if value.kind == "batch":
                value = self.seen(value)
            elif value.kind == "constant" and clients:
                value = self.with_clients(value)
            reads.append(value)
            return _Place(len(reads) - 1)

        return reads, map_aggregate(arguments, place)

    def with_clients(self, constant: Value) -> Value:
        """A constant as [1, ...], in the type that clients compute in."""

        def run(p: Stack, value: Tensor) -> Tensor:
            return (value.to(p.dtype) if value.is_floating_point() else value).unsqueeze(0)

        return self.new(run, [constant], "constant", shape=constant.shape)

    def tensor(self, value: Tensor) -> Value:
        """A tensor that is neither a parameter nor a buffer; on every device once, as a graph must not copy it."""
        copies: dict[torch.device, Tensor] = {}

        def run(p: Stack) -> Tensor:
            if p.device not in copies:
                copies[p.device] = value.detach().to(p.device)
            return copies[p.device]

        return self.new(run, [], "constant", shape=tuple(value.shape))

    def once(self, node: fx.Node, arguments: Any, options: Any) -> Any:
        """An operation on what is the same for all clients."""
        target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        reads, places = self.placed((arguments, options), clients=False)

        def run(p: Stack, *held: Any) -> Any:
            a, o = filled(places, held)
            if "device" in o:
                o = {**o, "device": p.device}  # that of the run, not that of the trace
            return target(*a, **o)

        return self.results(node, run, reads)

    def _indexed(self, node: fx.Node, x: Any, index: Any) -> Any:
        """By numbers, slices and constant tensors, or by a tensor for each of the first axes."""
        if any(value.kind in OF_CLIENTS for value in values_in(index)):
            indices = index if isinstance(index, tuple) else (index,)
            tensors = all(isinstance(value, Value) and value.kind != "other" for value in indices)
            return self.step(node, client_axis.indexed, (x, *indices), {}) if tensors else None
        reads, places = self.placed(self._without_lists(index), clients=False)
        (tensor,), _ = self.placed((x,))
        return self.results(node, lambda p, t, *held: client_axis.getitem(t, filled(places, held)), [tensor, *reads])

    def _without_lists(self, index: Any) -> Any:
        """Numbers as tensors that are on the device already, as a graph must not copy them."""
        if isinstance(index, tuple):
            return tuple(map(self._without_lists, index))
        return self.tensor(torch.tensor(index)) if isinstance(index, list) and not values_in(index) else index

    def _reshaped(self, node: fx.Node, x: Value) -> Value | None:
        """In the shape that the probes have, where at most one axis depends on the number of images."""
        first, second = (probe[node].sizes for probe in self.graph.probes)
        sizes = [a if a == b else -1 for a, b in zip(first, second, strict=True)]
        if sizes.count(-1) > 1:
            return None
        reads, _ = self.placed((x,))
        value: Value = self.results(node, lambda p, t: t.reshape(len(t), *sizes), reads)
        return value

    def _attribute(self, node: fx.Node, x: Value, name: Any = None, dim: int | None = None) -> Value | None:
        if operation(node) is getattr and name not in ATTRIBUTES:
            return None
        if operation(node) == "size":
            name, dim = "shape", name if dim is None else dim
        read = self.seen(x) if x.kind == "batch" else x
        if name in ("T", "mT"):
            a, b = (probe[node] for probe in self.graph.probes)
            return self.new(lambda p, t: t.mT, [read], **self.kind(a, b, [x]))
        if name in ("dtype", "device"):
            return self.new(lambda p, t: getattr(t, name), [read], "other")

        def run(p: Stack, t: Tensor) -> Any:
            sizes = t.shape[1:]
            if operation(node) == "numel":
                return sizes.numel()
            if operation(node) == "dim" or name == "ndim":
                return len(sizes)
            return sizes if dim is None else sizes[dim]

        return self.new(run, [read], "other")

    def results(self, node: fx.Node, run: Callable[..., Any], reads: Sequence[Value]) -> Any:
        """The values of a step that gives one tensor, or several."""
        first, second = (probe[node] for probe in self.graph.probes)
        if not isinstance(first, tuple):
            return self._result(first, second, run, reads, reads)
        whole = self.new(run, reads, "other")

        def parts(a: Any, b: Any, path: tuple[int, ...]) -> Any:
            if isinstance(a, tuple):
                return tuple(parts(*pair, (*path, i)) for i, pair in enumerate(zip(a, b, strict=True)))

            def item(p: Stack, held: Any) -> Any:
                for i in path:
                    held = held[i]
                return held

            return self._result(a, b, item, [whole], reads)

        return parts(first, second, ())

    def _result(
        self, first: Any, second: Any, run: Callable[..., Any], reads: Sequence[Value], sources: Sequence[Value]
    ) -> Value:
        """``sources``: what the tensor was computed from."""
        about = self.kind(first, second, sources)
        if about["kind"] in OF_CLIENTS and not any(source.kind in OF_CLIENTS for source in sources):
            return self.new(lambda p, *held: _expanded(run(p, *held), p), reads, **about)
        return self.new(run, reads, **about)

    def kind(self, first: Any, second: Any, reads: Sequence[Value]) -> dict[str, Any]:
        """What a step gives, from what it gives for the probes and from what it reads."""
        if not isinstance(first, Shape) or not isinstance(second, Shape):
            return {"kind": "other"}
        if (shape := images_shape(first, second)) is not None:
            return {"kind": "batch", "axes": Axes.plain(shape)}
        kinds = {read.kind for read in reads}
        if first != second or kinds & {"batch", "any"}:
            return {"kind": "any", "shape": first.sizes if first == second else ()}
        return {"kind": "parameter" if "parameter" in kinds else "constant", "shape": first.sizes}


def _expanded(value: Tensor, p: Stack) -> Tensor:
    """What depends on the number of images, but not on the client, as [C, ...]."""
    value = value.to(p.dtype) if value.is_floating_point() else value
    return value.expand(p.count, *value.shape)


def picked(several: Sequence[Any], which: Any) -> Any:
    """One of several values, by its number or its name."""
    return several[{"values": 0, "indices": 1}[which] if isinstance(which, str) else which]
