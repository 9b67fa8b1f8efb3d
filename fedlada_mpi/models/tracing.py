"""The operations of a module: traced with ``torch.fx``, or exported, and tried on two batches for their shapes."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from ..support.errors import first_line
from .form import Form
from .parameters import dtype_of, names_by_id, tensors
from .recurrent_dropout import is_recurrent
from .written_out import written_out

PROBES = (3, 2)  # images of two batches; what differs between them depends on the number of images
PICKING = (getattr, operator.getitem, "size")  # a size that may depend on the number of images, or another one
TYPES = (torch.dtype, torch.device, torch.finfo)  # other ones in a run than in the probes


class NotTraceable(Exception):
    """The module cannot run on stacked layers; the message names the layer or operation, and why."""


@contextmanager
def mode_of(module: nn.Module, training: bool) -> Iterator[None]:
    """As users expect of their module: Dropout acts in training, and not in evaluation."""
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


def has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or has_backward_hooks(layer))


def has_backward_hooks(layer: nn.Module) -> bool:
    return bool(layer._backward_hooks or layer._backward_pre_hooks)


def operation(node: fx.Node) -> Any:
    """The function that a node calls, or the name of the tensor's method; None if it calls neither."""
    return node.target if node.op in ("call_function", "call_method") else None


def described(node: fx.Node) -> str:
    """A node in messages: its layer, as in ``body.3 (Conv2d)``, or its operation."""
    return str(node.meta.get("layer") or getattr(node.target, "__name__", node.target))


# torch.fx replaces methods of nn.Module while it traces.
_tracing = threading.Lock()


@contextmanager
def _own_gradients_refused(traced: type = fx.Proxy) -> Iterator[None]:
    """Raise where a ``traced`` value of this thread reaches an ``autograd.Function``.

    A trace has its forward pass alone; the comparison with the module sees that only where the gradient of its small
    batch is another.
    """
    function: Any = torch.autograd.Function
    apply, thread = function.__dict__["apply"], threading.get_ident()

    def checked(kind: type, *args: Any, **kwargs: Any) -> Any:
        reached = any(isinstance(value, traced) for value in (*args, *kwargs.values()))
        # What is behind an underscore are torch's own, of which export consists.
        if reached and threading.get_ident() == thread and not kind.__module__.startswith("torch._"):
            raise TypeError(f"{kind.__name__} is an autograd.Function, with a gradient of its own")
        return apply.__get__(None, kind)(*args, **kwargs)

    function.apply = classmethod(checked)
    try:
        yield
    finally:
        function.apply = apply


# What takes no stand-in for a size or a type, so that torch.fx would not see it.
CREATING = ("finfo", "zeros", "ones", "full", "empty", "arange", "linspace", "eye")


@contextmanager
def _creation_recorded() -> Iterator[None]:
    """Record functions of torch that make something of a traced tensor's size or type."""
    functions = {name: getattr(torch, name) for name in CREATING}

    def recorded(function: Any) -> Callable[..., Any]:
        def create(*args: Any, **kwargs: Any) -> Any:
            proxies = list[fx.Proxy]()
            map_aggregate((args, kwargs), lambda v: proxies.append(v) if isinstance(v, fx.Proxy) else None)
            if not proxies:
                return function(*args, **kwargs)
            return proxies[0].tracer.create_proxy("call_function", function, args, kwargs)

        return create

    for name, function in functions.items():
        setattr(torch, name, recorded(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(torch, name, function)


@contextmanager
def _without_new_attributes(module: nn.Module) -> Iterator[None]:
    """Tensors that a trace stores in the module are there inside the block only."""
    before = set(vars(module))
    try:
        yield
    finally:
        for name in set(vars(module)) - before:
            delattr(module, name)


class _Tracer(fx.Tracer):
    """Records a layer of torch by its operation if it is a single one, such as ``F.conv2d``, and whole otherwise.

    Users' own layers are traced through.
    """

    def __init__(self, names: dict[int, str], buffers: bool) -> None:
        """``buffers`` are recorded like parameters; they are tensors in the trace otherwise."""
        super().__init__()
        self.names, self.thread, self.recorded = names, threading.get_ident(), Tensor if buffers else nn.Parameter
        self.untraceable_layer = ""  # the innermost one that raised

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_recurrent(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        layer = f"{self.path_of_module(m)} ({type(m).__name__})"
        try:
            if (steps := written_out(m)) is not None and not has_hooks(m):
                return steps(m, *args, **kwargs)
            if not self.is_leaf_module(m, ""):
                return super().call_module(m, forward, args, kwargs)
            result = self._single_operation(m, forward, args, kwargs)
            if result is None:
                result = super().call_module(m, forward, args, kwargs)
        except Exception:
            self.untraceable_layer = self.untraceable_layer or layer
            raise
        result.node.meta["layer"] = layer
        return result

    def _single_operation(
        self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> fx.Proxy | None:
        """The result of a layer that is one operation of one tensor; None, and no operation recorded, for any other."""
        if len(args) != 1 or kwargs or has_hooks(layer) or len(layer._modules):
            return None
        if isinstance(layer, nn.RNNBase):  # keeps the weights that it reads, which are placeholders here
            return None
        last = next(iter(reversed(self.graph.nodes)), None)
        try:
            result = forward(*args, **kwargs)
        except Exception:  # for example where the layer asks for the number of axes
            result = None
        recorded = takewhile(lambda node: node is not last, reversed(self.graph.nodes))
        operations = [node for node in recorded if node.op != "get_attr"]
        if isinstance(result, fx.Proxy) and operations == [result.node]:
            return result
        for node in operations:
            self.graph.erase_node(node)
        return None

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """A parameter as a node; torch.fx itself would search the whole module for the name of each."""
        name = self.names.get(id(attr_val)) if isinstance(attr_val, self.recorded) else None
        if name is None or threading.get_ident() != self.thread:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]


class Graph:
    """The operations of a module, and the shapes that they give for the probes."""

    def __init__(self, module: nn.Module, form: Form):
        self.module, self.form, self.tensors = module, form, tensors(module)
        self.names = names_by_id(module)
        if has_hooks(module) or any(map(has_backward_hooks, module.modules())):
            raise NotTraceable("it has hooks on the whole model, or on gradients")
        # A buffer may be indexed by a traced size; torch.export takes seconds, and follows what torch.fx cannot.
        ways = (partial(self._traced, buffers=False), partial(self._traced, buffers=True), self._exported)
        errors = []
        for way in ways:
            try:
                with _without_new_attributes(module):
                    self._probed(way())
                return
            except Exception as error:  # of many kinds
                errors.append(error)
        raise errors[0] if isinstance(errors[0], NotTraceable) else NotTraceable(first_line(errors[0]))

    def _probed(self, graph: fx.Graph) -> None:
        """Take a graph, with what its operations give for the probes."""
        self.graph, form = graph, self.form
        arguments = [node for node in graph.nodes if node.op == "placeholder"]
        if form.single is None:
            self.inputs = {node: str(node.target) for node in arguments if node.target in form.names}
        else:
            self.inputs = dict.fromkeys(arguments[:1], "")
        for node in arguments:
            if node not in self.inputs:  # its value is in the trace, together with checks of it
                for user in list(node.users):
                    graph.erase_node(user)
        self.probes = [self._probe(images) for images in PROBES]
        self.of_sizes = self._of_sizes()
        self.captured = {str(n.target): self._attribute(n) for n in graph.nodes if n.op == "get_attr"}

    def _traced(self, buffers: bool) -> fx.Graph:
        tracer = _Tracer(self.names, buffers)
        try:
            with _tracing, _own_gradients_refused(), _creation_recorded():
                return tracer.trace(self.module, concrete_args=_left_out(self.module, self.form))
        except Exception as error:
            where = tracer.untraceable_layer or type(self.module).__name__
            raise NotTraceable(f"{where} cannot be traced: {first_line(error)}") from None

    def _exported(self) -> fx.Graph:
        # Here, as it imports torch's compiler, which few models need.
        from .exported import exported

        with _tracing, _own_gradients_refused(Tensor):
            return exported(self.module, self.form, PROBES[0])

    def _attribute(self, node: fx.Node) -> Tensor:
        owner, _, attribute = str(node.target).rpartition(".")
        value: Tensor = getattr(self.module.get_submodule(owner), attribute)
        return value

    def _probe(self, images: int) -> dict[fx.Node, Any]:
        recorder = _Recorder(self.module, self.graph)
        positional, named = self.form.seen(self.form.zeros(images, dtype=dtype_of(self.module)))
        given = named or {"": positional[0]}
        arguments = (node for node in self.graph.nodes if node.op == "placeholder")
        defaults = {node: node.args[0] if node.args else None for node in arguments}
        with torch.no_grad():
            recorder.run(*(given[self.inputs[n]] if n in self.inputs else value for n, value in defaults.items()))
        return recorder.results

    def layer(self, node: fx.Node) -> nn.Module | None:
        """The layer that a node calls whole; None if it calls an operation."""
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def parameter(self, node: fx.Node) -> str | None:
        """The name of the parameter or buffer that a node reads."""
        return self.names.get(id(self.captured[str(node.target)]))

    def uses(self) -> dict[str, int]:
        """How often each parameter or buffer is used."""
        count: dict[str, int] = {}
        for node in self.graph.nodes:
            layer = self.layer(node)
            if layer is not None:
                used, times = [self.names[id(value)] for value in tensors(layer).values()], 1
            elif node.op == "get_attr" and (name := self.parameter(node)) is not None:
                used, times = [name], len(node.users)
            else:
                continue
            for name in used:
                count[name] = count.get(name, 0) + times
        return count

    def constant(self, node: fx.Node) -> tuple[bool, Any]:
        """Whether a node gives the same numbers for any batch, and which."""
        first, second = (probe[node] for probe in self.probes)
        typed = any(isinstance(self.probes[0][read], TYPES) for read in (node, *node.all_input_nodes))
        return not typed and not has_shapes(first) and first == second and node not in self.of_sizes, first

    def _of_sizes(self) -> set[fx.Node]:
        """The nodes that compute numbers from the number of images, also where these are the same for both probes."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            first, second = (probe[node] for probe in self.probes)
            if has_shapes(first) or (first == second and operation(node) in PICKING):
                continue
            if first != second or any(read in found for read in node.all_input_nodes):
                found.add(node)
        return found

    def activation_shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """The shape, after the batch, of a tensor whose first axis is the batch; None if the node gives none."""
        first, second = (probe[node] for probe in self.probes)
        return images_shape(first, second)


def _left_out(module: nn.Module, form: Form) -> dict[str, Any] | None:
    """The arguments of a module that the data has no array for, at their defaults."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    given = parameters[:1] if form.single is not None else [p for p in parameters if p.name in form.names]
    others = {p.name: p.default for p in parameters if p not in given and p.default is not p.empty}
    return others or None


class _Recorder(fx.Interpreter):
    """Runs a graph with the parameters of its module, and remembers the shapes that every node gives."""

    def __init__(self, module: nn.Module, graph: fx.Graph):
        super().__init__(module, graph=graph)
        self.results: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.results[n] = _shapes(result)
        return result


@dataclass(frozen=True)
class Shape:
    """Of a tensor."""

    sizes: tuple[int, ...]


def _shapes(result: Any) -> Any:
    """The result of a node with shapes in place of tensors."""
    if isinstance(result, Tensor):
        return Shape(tuple(result.shape))
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        return tuple(map(_shapes, result))
    return result


def images_shape(first: Any, second: Any) -> tuple[int, ...] | None:
    """The shape, after the first axis, of a tensor with one or several rows for each image of the probes; or None."""
    if not isinstance(first, Shape) or not isinstance(second, Shape) or not first.sizes:
        return None
    (a, *shape), (b, *other) = first.sizes, second.sizes
    rows = a - b
    return tuple(shape) if rows > 0 and (a, b) == (PROBES[0] * rows, PROBES[1] * rows) and shape == other else None


def has_shapes(result: Any) -> bool:
    return isinstance(result, Shape) or (isinstance(result, tuple) and any(map(has_shapes, result)))
