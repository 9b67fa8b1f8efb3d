"""A plain module put onto the stacked layers, operation by operation.

``operations.py`` has the stacked layers and ``general.py`` the operations that act on all clients at once; every other
one runs under ``vmap``. A module that cannot be traced or translated is refused with the layer that is the reason, and
trains on the generic engine.
"""

from __future__ import annotations

import copy
import operator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

from ..support.errors import first_line
from .form import Form, Stored
from .general import OF_CLIENTS, filled
from .layout import Kernel
from .operations import Operations
from .program import StackedProgram, Value
from .stack import Stack
from .tracing import Graph, NotTraceable, described, mode_of

IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}


@dataclass
class Traced:
    """The programs of a module for training and for evaluation, and how they store the weights of products."""

    training: StackedProgram
    evaluation: StackedProgram
    kernels: dict[str, Kernel]
    groups: dict[str, int]
    dead: dict[str, list[int]]
    used: set[str]  # parameters that have a gradient in training

    def __call__(self, p: Stack, inputs: Stored) -> Tensor:
        return self.program(p)(p, inputs)

    def program(self, p: Stack) -> StackedProgram:
        return self.training if p.training else self.evaluation


def translate(module: nn.Module, form: Form, general: bool = True) -> Traced:
    """The module, which takes examples of this form, on stacked layers.

    Without ``general``, operations that are no layer of ``operations.py`` run under vmap.
    """
    graphs = {}
    for training in (True, False):
        with mode_of(module, training):
            graphs[training] = Graph(module, form)
    shared = {name for graph in graphs.values() for name, count in graph.uses().items() if count > 1}
    translations, programs = {}, {}
    for training, graph in graphs.items():
        translations[training] = _Translation(graph, shared, general)
        with mode_of(module, training):
            programs[training] = translations[training].translated()
    a, b = translations[True], translations[False]
    stored = (_joined(a.kernels, b.kernels), _joined(a.groups, b.groups), _joined(a.dead, b.dead))
    return Traced(programs[True], programs[False], *stored, a.used)


def _joined(in_training: dict[str, Any], in_evaluation: dict[str, Any]) -> dict[str, Any]:
    """How weights are stored, which must be the same in both modes."""
    if any(in_training.get(name, value) != value for name, value in in_evaluation.items()):
        raise NotTraceable("a layer works in training and in evaluation on maps of different sizes")
    return in_training | in_evaluation


class _Translation(Operations):
    """The steps that stacked layers take for the operations of a graph."""

    def translated(self) -> StackedProgram:
        result: Any = None
        for node in self.graph.graph.nodes:
            try:
                if node.op == "output":
                    result = self._evaluated(node.args)[0]
                elif not self.fusion.joins(node) and (value := self._value(node)) is not None:
                    self.fusion.values[node] = value
            except NotTraceable:
                raise
            except Exception as error:
                raise NotTraceable(f"{described(node)}: {first_line(error)}") from None
        if not isinstance(result, Value) or result.kind != "batch":
            raise NotTraceable("its outputs are not one tensor of the examples")
        return self.program(result)

    def _evaluated(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self.fusion.value)

    def _value(self, node: fx.Node) -> Any:
        """What a node gives; None while it waits for the operation behind it."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            name = self.graph.parameter(node)
            return self.parameter(name) if name is not None else self.tensor(self.graph.captured[str(node.target)])
        constant, numbers = self.graph.constant(node)
        if constant:
            return numbers
        arguments, options = self._evaluated(node.args), self._evaluated(node.kwargs)
        value = self.stacked(node, arguments, options)
        if node in self.fusion.waiting:
            return None
        if value is None:
            value = self.general(node, arguments, options)
        if value is None:
            value = self._by_vmap(node, arguments, options)
        if self._in_place(node) and isinstance(node.args[0], fx.Node):
            self.fusion.values[node.args[0]] = value
        return value

    def _placeholder(self, node: fx.Node) -> Any:
        if node not in self.graph.inputs:  # an argument that the data has no array for
            return node.args[0] if node.args else None
        name = self.graph.inputs[node]
        return Value(self.inputs.index(name), "batch", self.graph.form.axes_of(name))

    def _in_place(self, node: fx.Node) -> bool:
        layer = self.graph.layer(node)
        if layer is not None:
            return bool(getattr(layer, "inplace", False))
        by_name = node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
        return by_name or node.target in IN_PLACE or bool(node.kwargs.get("inplace"))

    def _by_vmap(self, node: fx.Node, arguments: Any, options: Any) -> Any:
        """Any operation or layer: on what it takes of one client, under vmap."""
        layer = self.graph.layer(node)
        parameters: Any = {} if layer is None else self.parameters_of(layer)
        separate = copy.deepcopy(layer)
        target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        reads, places = self.placed((parameters, arguments, options), clients=False)
        of_clients = [i for i, value in enumerate(reads) if value.kind in OF_CLIENTS]
        self.vmapped.append(described(node))

        def run(p: Stack, *held: Any) -> Any:
            def call(*tensors: Any) -> Any:
                given = dict(enumerate(held)) | dict(zip(of_clients, tensors, strict=True))
                own, a, o = filled(places, given)
                return target(*a, **o) if separate is None else functional_call(separate, dict(own), a, dict(o))

            with p.draws or nullcontext():
                return vmap(call, randomness="different")(*(held[i] for i in of_clients))

        return self.results(node, run, reads)
