"""A plain module put onto the stacked layers, operation by operation.

Common layers become those of ``layers.py``; operations without parameters of their own act on all clients at once where
that is the same, and every other operation runs under ``vmap``. What cannot be traced or translated is refused with the
layer in the way; the module then trains on the generic engine.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

from ..support.errors import first_line
from . import layers
from .axes import Axes
from .columns import Window, pair
from .layers import Stack
from .layout import Kernel
from .program import Builder, Program, Value
from .tracing import PROBES, Graph, NotTraceable, Shape, has_shapes, mode_of
from .trial import tensors


@dataclass
class Traced:
    """The programs of a module for training and for evaluation, and how they store the weights of products."""

    training: Program
    evaluation: Program
    kernels: dict[str, Kernel]
    groups: dict[str, int]
    dead: dict[str, list[int]]
    used: set[str]  # parameters that have a gradient in training

    def __call__(self, p: Stack, images: Tensor) -> Tensor:
        return (self.training if p.training else self.evaluation)(p, images)


def translate(module: nn.Module, image_shape: tuple[int, int, int]) -> Traced:
    """The module, which takes images [N, channels, rows, columns], on stacked layers."""
    names = {id(value): name for name, value in tensors(module).items()}
    graphs = {}
    for training in (True, False):
        with mode_of(module, training):
            graphs[training] = Graph(module, image_shape, names)
    kernels: dict[str, Kernel] = {}
    groups: dict[str, int] = {}
    dead: dict[str, list[int]] = {}
    shared = {name for graph in graphs.values() for name, count in graph.uses().items() if count > 1}
    programs = {}
    used: set[str] = set()
    for training, graph in graphs.items():
        with mode_of(module, training):
            translation = _Translation(graph, names, shared, training)
            programs[training] = translation.translated()
        found: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
            (kernels, translation.kernels), (groups, translation.groups), (dead, translation.dead)
        )  # fmt: skip
        for all_of, new in found:
            if any(all_of.get(name, value) != value for name, value in new.items()):
                raise NotTraceable("a layer works in training and in evaluation on maps of different sizes")
            all_of.update(new)
        if training:
            used = translation.used
    return Traced(programs[True], programs[False], kernels, groups, dead, used)


# What acts on every number by itself, so on any order of the axes.
ELEMENTWISE: set[Any] = {
    *(F.relu, torch.relu, F.gelu, F.silu, torch.tanh, F.tanh, torch.sigmoid, F.sigmoid, F.leaky_relu, F.elu, F.relu6),
    *(F.hardswish, F.hardtanh, F.hardsigmoid, F.softplus, F.mish, F.selu, F.celu, F.logsigmoid, F.softsign),
    *(torch.erf, torch.exp, torch.log, torch.log1p, torch.expm1, torch.sqrt, torch.rsqrt, torch.abs, torch.square),
    *(torch.neg, torch.sin, torch.cos, torch.reciprocal, torch.clamp, torch.pow, operator.neg, operator.pow),
}
ELEMENTWISE_METHODS = {
    *("relu", "tanh", "sigmoid", "erf", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "abs", "square", "neg"),
    *("sin", "cos", "reciprocal", "clamp", "pow"),
}
ELEMENTWISE_LAYERS = {
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.ReLU6, nn.Hardswish, nn.Hardtanh),
    *(nn.Hardsigmoid, nn.Softplus, nn.Mish, nn.SELU, nn.CELU, nn.LogSigmoid, nn.Softsign),
}
BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), torch.add),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub", "sub_"), torch.sub),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), torch.mul),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div, "div", "div_"), torch.div),
}
ADDITIONS: set[Any] = {key for key, function in BINARY.items() if function is torch.add}
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
# What acts on every image by itself, and takes images in any order of memory.
ON_IMAGES: set[Any] = {F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate}
ON_IMAGES_LAYERS = {nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample}
RESHAPING: set[Any] = {torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, torch.unflatten}
RESHAPING |= {"flatten", "reshape", "view", "squeeze", "unsqueeze", "unflatten", "contiguous", "clone"}
PERMUTING: dict[Any, str] = {
    torch.permute: "permute",
    "permute": "permute",
    torch.transpose: "transpose",
    "transpose": "transpose",
}
REDUCING: dict[Any, Any] = {torch.mean: torch.mean, "mean": torch.mean, torch.sum: torch.sum, "sum": torch.sum}
SIZES: set[Any] = {"size", "dim"}
RELU: set[Any] = {F.relu, torch.relu, "relu", "relu_"}


class _Translation(Builder):
    """The steps that stacked layers take for the operations of a graph."""

    def __init__(self, graph: Graph, names: dict[int, str], shared: set[str], training: bool):
        super().__init__()
        self.graph, self.module, self.names = graph, graph.module, names
        self.shared, self.training = shared, training
        self.values: dict[fx.Node, Any] = {}
        self.parameters: dict[str, Value] = {}
        # Norms that wait for the addition or ReLU behind them, to take it along, and products for their activation.
        self.pending: dict[fx.Node, Callable[[Value | None, bool], Value]] = {}
        self.products: dict[fx.Node, Callable[[str], Value]] = {}
        self.with_residual: set[fx.Node] = set()
        self.kernels: dict[str, Kernel] = {}
        self.groups: dict[str, int] = {}
        self.dead: dict[str, list[int]] = {}

    def translated(self) -> Program:
        result: Any = None
        for node in self.graph.graph.nodes:
            try:
                if node.op == "output":
                    result = self.arguments(node.args)[0]
                elif (value := self._translated(node)) is not None:
                    self.values[node] = value
            except NotTraceable:
                raise
            except Exception as error:
                raise NotTraceable(f"{self._named(node)}: {first_line(error)}") from None
        if not isinstance(result, Value) or result.kind != "batch":
            raise NotTraceable("its outputs are not one tensor of the images")
        return self.program(result)

    def _named(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return f"{node.target} ({type(self.module.get_submodule(str(node.target))).__name__})"
        return str(getattr(node.target, "__name__", node.target))

    # Values and arguments.

    def value(self, node: fx.Node) -> Any:
        if node in self.pending:
            self.values[node] = self.pending.pop(node)(None, False)
        if node in self.products:
            self.values[node] = self.products.pop(node)("")
        return self.values[node]

    def arguments(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self.value)

    def result_shape(self, node: fx.Node) -> tuple[int, ...]:
        """Of activations, without the batch."""
        shape = self._without_batch(node)
        if shape is None:
            raise NotTraceable(f"{self._named(node)} moves or mixes the images of a batch")
        return shape

    def _without_batch(self, node: fx.Node) -> tuple[int, ...] | None:
        """The shape of a tensor whose first axis is the batch; None if the node gives something else."""
        first, second = (probe[node] for probe in self.graph.probes)
        if not isinstance(first, Shape) or not isinstance(second, Shape):
            return None
        a, b = first.sizes, second.sizes
        return a[1:] if (a[:1], b[:1]) == (PROBES[:1], PROBES[1:]) and a[1:] == b[1:] else None

    def own(self, layer: nn.Module, name: str) -> Value | None:
        """A parameter or buffer of a layer."""
        tensor = getattr(layer, name, None)
        return None if tensor is None else self._parameter(self.names[id(tensor)], tensor)

    def _parameter(self, name: str, tensor: Tensor) -> Value:
        """One value for all uses, so that autograd adds up their gradients."""
        return self.parameters.setdefault(name, Value(-1, "parameter", shape=tuple(tensor.shape), name=name))

    def owned(self, value: Value | None) -> str | None:
        """The name of a layer's parameter."""
        if value is None:
            return None
        self.used.add(value.name)
        return value.name

    def alone(self, *values: Any) -> bool:
        """Whether each is a parameter that nothing else uses, or none."""
        return all(v is None or (isinstance(v, Value) and v.name and v.name not in self.shared) for v in values)

    # Operations.

    def _translated(self, node: fx.Node) -> Any:
        """The node's value; None while it waits for the operation behind it."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            name = self.graph.parameter(str(node.target))
            if name is None:
                raise NotTraceable(f"{node.target} is neither a parameter nor a buffer")
            return self._parameter(name, tensors(self.module)[name])
        known = [probe[node] for probe in self.graph.probes]
        if not has_shapes(known[0]) and known[0] == known[1]:
            return known[0]  # the same for any batch
        if self._takes_residual(node) or self._takes_relu(node) or self._takes_activation(node):
            return None if node in self.pending else self.values[node]
        layer = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        arguments, options = self.arguments(node.args), self.arguments(node.kwargs)
        value = self._fast(node, layer, arguments, options)
        if node in self.pending or node in self.products:
            return None
        if value is None:
            value = self._general(node, layer, arguments, options)
        if self._in_place(node, layer) and isinstance(node.args[0], fx.Node):
            self.values[node.args[0]] = value
        return value

    def _placeholder(self, node: fx.Node) -> Any:
        if self.values:  # an argument after the images
            return node.args[0] if node.args else None
        rows, columns, channels = self.graph.image_shape
        return Value(0, "batch", Axes.channels_last(channels, rows, columns))

    def _in_place(self, node: fx.Node, layer: nn.Module | None) -> bool:
        if layer is not None:
            return bool(getattr(layer, "inplace", False))
        by_name = node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
        return by_name or node.target in IN_PLACE or bool(node.kwargs.get("inplace"))

    def _fast(self, node: fx.Node, layer: nn.Module | None, arguments: Any, options: dict[str, Any]) -> Value | None:
        """By stacked layers, or by one operation for all clients; None where there is no such way."""
        x = arguments[0] if arguments else None
        if layer is not None:
            if not isinstance(x, Value) or x.kind != "batch" or len(arguments) > 1 or options or _has_hooks(layer):
                return None
            return self._layer(node, layer, x)
        options = {name: value for name, value in options.items() if name != "inplace"}
        target: Any = node.target
        if target in BINARY and len(arguments) == 2 and not options:
            return self._binary(BINARY[target], *arguments)
        if target is torch.cat or target is torch.concat:
            return self._cat(node, *arguments, **options)
        if not isinstance(x, Value) or x.kind != "batch":
            return None
        if target is F.conv2d:
            return self._conv(node, *arguments, **options)
        if target is F.linear:
            return self._linear(node, *arguments, **options)
        if target is F.group_norm:
            return self._group_norm(node, *arguments, **options)
        if target is F.layer_norm:
            return self._layer_norm(*arguments, **options)
        if target is F.dropout:
            return self._dropout(*arguments, **options)
        if getattr(target, "__module__", "") == "torchvision.ops.stochastic_depth":
            return self._stochastic_depth(*arguments, **options)
        if target in RESHAPING:
            return self.regrouped(x, self.result_shape(node))
        if target in PERMUTING:
            return self._permuted(x, PERMUTING[target], arguments[1:], options)
        if target in SIZES or (target is getattr and arguments[1] == "shape"):
            return self._size(x, target, arguments[1:])
        if _has_values((arguments[1:], options)):
            return None
        if target in ELEMENTWISE or (node.op == "call_method" and str(target).rstrip("_") in ELEMENTWISE_METHODS):
            function = getattr(torch, str(target).rstrip("_")) if node.op == "call_method" else target
            return self._each(x, function, arguments[1:], options)
        if target in REDUCING:
            return self._reduced(x, REDUCING[target], *arguments[1:], **options)
        if target in ON_IMAGES and not options.get("return_indices"):
            pooled = None
            if target is F.adaptive_avg_pool2d:
                pooled = self._average_pool(x, *arguments[1:], **options)
            if target is F.max_pool2d:
                pooled = self._max_pool(x, *arguments[1:], **options)
            return pooled or self._on_images(node, x, lambda images: target(images, *arguments[1:], **options))
        return None

    def _layer(self, node: fx.Node, layer: Any, x: Value) -> Value | None:
        kind = type(layer)
        if kind is nn.Conv2d:
            if layer.padding_mode != "zeros":
                return None
            sizes = (layer.stride, layer.padding, layer.dilation, layer.groups)
            return self._conv(node, x, self.own(layer, "weight"), self.own(layer, "bias"), *sizes)
        if kind is nn.Linear:
            return self._linear(node, x, self.own(layer, "weight"), self.own(layer, "bias"))
        if kind is nn.GroupNorm:
            affine = (self.own(layer, "weight"), self.own(layer, "bias"))
            return self._group_norm(node, x, layer.num_groups, *affine, layer.eps)
        if kind is nn.InstanceNorm2d and not layer.track_running_stats:
            affine = (self.own(layer, "weight"), self.own(layer, "bias"))
            return self._group_norm(node, x, x.axes.shape[0], *affine, layer.eps)
        if kind is nn.LayerNorm:
            affine = (self.own(layer, "weight"), self.own(layer, "bias"))
            return self._layer_norm(x, layer.normalized_shape, *affine, layer.eps)
        if kind is nn.Dropout:
            return self._dropout(x, layer.p, layer.training)
        if kind is nn.Identity:
            return x
        if kind in (nn.Flatten, nn.Unflatten):
            return self.regrouped(x, self.result_shape(node))
        if kind in ON_IMAGES_LAYERS and not getattr(layer, "return_indices", False):
            pooled = None
            if kind is nn.AdaptiveAvgPool2d:
                pooled = self._average_pool(x, layer.output_size)
            if kind is nn.MaxPool2d:
                sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
                pooled = self._max_pool(x, *sizes, layer.ceil_mode)
            return pooled or self._on_images(node, x, layer.forward)
        if kind in ELEMENTWISE_LAYERS:
            separate = copy.copy(layer)
            separate.inplace = False  # the input may be needed again
            return self._each(x, separate.forward, (), {})
        return None

    def _each(self, x: Value, function: Any, arguments: Any, options: dict[str, Any]) -> Value:
        return self.emit(lambda p, value: function(value, *arguments, **options), [x], x.axes)

    def _map(self, x: Value) -> Value | None:
        """Channels last in memory, if it is a map."""
        return self.arranged(x, (1, 2, 0)) if x.axes.simple and len(x.axes.shape) == 3 else None

    def _conv(
        self, node: fx.Node, x: Value, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Value | None:  # fmt: skip
        image = self._map(x)
        if image is None or not self.alone(weight, bias):
            return None
        channels, rows, columns = x.axes.shape
        out, inner, *kernel = weight.shape
        if padding == "valid":
            padding = 0
        if padding == "same":
            reach = [d * (k - 1) for d, k in zip(pair(dilation), kernel, strict=True)]
            if any(r % 2 for r in reach):
                return None
            padding = [r // 2 for r in reach]
        window = Window(rows, columns, pair(kernel), pair(stride), pair(padding), pair(dilation))
        self.kernels[weight.name] = (out, inner, *window.kernel)
        if 1 < groups < channels or (groups == channels > 1 and out != channels):
            self.groups[weight.name] = groups
        if groups == 1 and window.dead:
            self.dead[weight.name] = window.dead
        w, b = weight.name, self.owned(bias)
        self.owned(weight)
        axes = Axes.channels_last(out, *window.out)

        def with_next(activation: str) -> Value:
            return self.emit(lambda p, v: layers.conv(p, v, w, b, window, groups, activation), [image], axes)

        return self._product(node, with_next)

    def _linear(self, node: fx.Node, x: Value, weight: Any, bias: Any = None) -> Value | None:
        if not self.alone(weight, bias):
            return None
        out, inner = weight.shape
        axes, last = x.axes, len(x.axes.shape) - 1
        kernel: Kernel = (out, inner, 1, 1)
        if last == 0 and axes.parts == (3,) and axes.order == (1, 2, 0):
            kernel = (out, axes.sizes[0], axes.sizes[1], axes.sizes[2])  # over a flattened map
            x = self.emit(lambda p, value: value.flatten(2), [x], Axes.plain((inner,)))
        elif not axes.simple:
            x = self.seen(x)
        x = self.arranged(x, [*(atom for atom in x.axes.order if atom != last), last])
        self.kernels[weight.name] = kernel
        w, b = weight.name, self.owned(bias)
        self.owned(weight)

        def with_next(activation: str) -> Value:
            return self.emit(lambda p, v: layers.linear(p, v, w, b, activation), [x], x.axes.resized(last, out))

        return self._product(node, with_next)

    def _product(self, node: fx.Node, with_next: Callable[[str], Value]) -> Value | None:
        if len(node.users) == 1 and self._activation(next(iter(node.users))):
            self.products[node] = with_next
            return None
        return with_next("")

    def _activation(self, node: fx.Node) -> str:
        """Its name in ``layers.ACTIVATIONS``, "" if the node is none of them."""
        if self._is_relu(node):
            return "relu"
        layer: Any = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        smooth: Any = None  # of a GELU
        if layer is not None:
            if _has_hooks(layer) or type(layer) not in (nn.GELU, nn.SiLU):
                return ""
            smooth = getattr(layer, "approximate", None)
        elif node.target in (F.gelu, F.silu) and len(node.args) == 1:
            smooth = node.kwargs.get("approximate", "none") if node.target is F.gelu else None
        else:
            return ""
        return {None: "silu", "none": "gelu", "tanh": "gelu_tanh"}.get(smooth, "")

    def _takes_activation(self, node: fx.Node) -> bool:
        """Whether the node is the activation of a product, which takes it along."""
        if not node.args or node.args[0] not in self.products:
            return False
        before: Any = node.args[0]
        self.values[node] = self.values[before] = self.products.pop(before)(self._activation(node))
        return True

    def _group_norm(
        self, node: fx.Node, x: Value, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Value | None:
        if not x.axes.simple or len(x.axes.shape) not in (1, 3) or not self.alone(weight, bias):
            return None
        image = x
        if len(x.axes.shape) == 1:
            image = self.regrouped(x, (*x.axes.shape, 1, 1))
        image = self.arranged(image, (1, 2, 0))
        w, b, axes, shape = self.owned(weight), self.owned(bias), image.axes, x.axes.shape

        def with_next(residual: Value | None, relu: bool) -> Value:
            reads = [image] if residual is None else [image, residual]
            value = self.emit(
                lambda p, v, r=None: layers.norm(p, v, w, b, groups, eps, residual=r, relu=relu), reads, axes
            )
            return self.regrouped(value, shape)

        if len(node.users) == 1 and len(shape) == 3:
            (user,) = node.users
            if self._is_relu(user) or (user.target in ADDITIONS and not user.kwargs):
                self.pending[node] = with_next
                return None
        return with_next(None, False)

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            layer = self.module.get_submodule(str(node.target))
            return type(layer) is nn.ReLU and not _has_hooks(layer)
        return node.target in RELU

    def _takes_relu(self, node: fx.Node) -> bool:
        """Whether the node is a ReLU behind a norm, which takes it along."""
        if not self._is_relu(node) or node.args[0] not in self.pending:
            return False
        before: Any = node.args[0]
        self.values[node] = self.values[before] = self.pending.pop(before)(None, True)
        return True

    def _takes_residual(self, node: fx.Node) -> bool:
        """Whether the node is an addition behind a norm, which takes it along."""
        if node.target not in ADDITIONS or len(node.args) != 2 or node.kwargs:
            return False
        first: Any = node.args[0]
        second: Any = node.args[1]
        if first not in self.pending or first in self.with_residual:
            first, second = second, first
        if first not in self.pending or first in self.with_residual or not isinstance(second, fx.Node):
            return False
        norm, axes = self.pending[first], Axes.channels_last(*self.result_shape(first))
        residual = self.value(second) if second is not first else None
        if not isinstance(residual, Value) or residual.kind != "batch" or residual.axes != axes:
            return False
        del self.pending[first]
        if len(node.users) == 1 and self._is_relu(next(iter(node.users))):
            self.pending[node] = lambda _, relu: norm(residual, relu)
            self.with_residual.add(node)
        else:
            self.values[node] = norm(residual, False)
        return True

    def _layer_norm(
        self, x: Value, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Value | None:
        last = len(x.axes.shape) - 1
        if len(tuple(normalized_shape)) != 1 or not self.alone(weight, bias):
            return None
        x = x if x.axes.simple else self.seen(x)
        x = self.arranged(x, [*(atom for atom in x.axes.order if atom != last), last])
        w, b = self.owned(weight), self.owned(bias)
        return self.emit(lambda p, value: layers.layer_norm(p, value, w, b, eps), [x], x.axes)

    def _dropout(self, x: Value, p: Any = 0.5, training: Any = True) -> Value:
        """Drawn in the user's order of the elements, so that every engine drops the same ones."""
        if not training or p == 0:
            return x
        axes, atoms = x.axes, Axes.plain(x.axes.sizes)

        def run(stack: Stack, value: Tensor) -> Tensor:
            with stack.draws or nullcontext():
                kept = F.dropout(axes.as_seen(value), p, True)
            return atoms.arranged(kept.reshape(*kept.shape[:2], *axes.sizes), axes.order)

        return self.emit(run, [x], axes)

    def _stochastic_depth(self, x: Value, p: float, mode: str, training: bool = True) -> Value:
        """torchvision's: an image, or all of a client's batch, skips a branch."""
        if not training or p == 0:
            return x

        def run(stack: Stack, value: Tensor) -> Tensor:
            images = value.shape[1] if mode == "row" else 1
            noise = value.new_empty(len(value), images, *(1,) * (value.dim() - 2))
            with stack.draws or nullcontext():
                noise.bernoulli_(1 - p)
            return value * (noise / (1 - p) if p < 1 else noise)

        return self.emit(run, [x], x.axes)

    def _permuted(self, x: Value, how: str, dims: Any, options: dict[str, Any]) -> Value | None:
        if options:
            return None
        rank = len(x.axes.shape) + 1
        if how == "transpose":
            a, b = (d % rank for d in dims)
            order = list(range(rank))
            order[a], order[b] = b, a
        else:
            order = [d % rank for d in (dims[0] if isinstance(dims[0], (list, tuple)) else dims)]
        if order[0] != 0:
            return None
        value = copy.copy(x)
        value.axes = x.axes.permuted([d - 1 for d in order[1:]])
        return value

    def _size(self, x: Value, target: Any, arguments: Any) -> Value:
        """The batch is known only when the program runs."""
        shape = x.axes.shape

        def run(p: Stack, value: Tensor) -> Any:
            sizes = torch.Size((value.shape[1], *shape))
            return sizes[arguments[0]] if target == "size" and arguments else sizes

        return self.new(run, [x], "other")

    def _binary(self, function: Callable[[Any, Any], Any], a: Any, b: Any) -> Value | None:
        batches = [isinstance(v, Value) and v.kind == "batch" for v in (a, b)]
        if all(batches):
            if a.axes != b.axes:
                if not (a.axes.simple and b.axes.simple) or len(a.axes.shape) != len(b.axes.shape):
                    return None
                b = self.arranged(b, a.axes.order)
            sizes = tuple(max(pair) for pair in zip(a.axes.sizes, b.axes.sizes, strict=True))
            return self.emit(lambda p, x, y: function(x, y), [a, b], Axes(sizes, a.axes.parts, a.axes.order))
        x, other = (a, b) if batches[0] else (b, a)
        if not isinstance(x, Value) or x.kind != "batch":
            return None
        turned = function if batches[0] else lambda first, second: function(second, first)
        if isinstance(other, (int, float)):
            return self.emit(lambda p, value: turned(value, other), [x], x.axes)
        if not isinstance(other, Value) or other.kind != "parameter" or not x.axes.simple:
            return None
        axes, rank, shape = x.axes, len(x.axes.shape), other.shape
        shape = shape[1:] if len(shape) == rank + 1 and shape[0] == 1 else shape
        shape = (1,) * (rank - len(shape)) + tuple(shape)
        if len(shape) != rank or any(s not in (1, size) for s, size in zip(shape, axes.shape, strict=True)):
            return None
        along = [axis for axis, size in enumerate(shape) if size == axes.shape[axis] and size > 1]
        if function is torch.mul and len(along) == 1 and axes.order[-1] == along[0] and self.alone(other):
            name = str(self.owned(other))
            return self.emit(lambda p, value: layers.scale(p, value, name), [x], axes)
        plain = Axes.plain(shape)

        def with_parameter(p: Stack, value: Tensor, parameter: Tensor) -> Tensor:
            return turned(value, plain.arranged(parameter.reshape(-1, 1, *shape), axes.order))

        return self.emit(with_parameter, [x, other], axes)

    def _cat(self, node: fx.Node, values: Any, dim: int = 0, axis: int | None = None) -> Value | None:
        if not all(isinstance(v, Value) and v.kind == "batch" for v in values):
            return None
        shape = self.result_shape(node)
        where = (dim if axis is None else axis) % (len(shape) + 1) - 1
        if where < 0:
            return None
        values = [v if v.axes.simple else self.seen(v) for v in values]
        values = [self.arranged(v, values[0].axes.order) for v in values]
        axes = values[0].axes.resized(where, shape[where])
        place = axes.place(where)
        return self.emit(lambda p, *parts: torch.cat(parts, place), values, axes)

    def _reduced(self, x: Value, function: Any, dim: Any = None, keepdim: bool = False) -> Value | None:
        rank = len(x.axes.shape) + 1
        dims = sorted(d % rank for d in ([dim] if isinstance(dim, int) else dim or [0]))
        if dims[0] == 0:
            return None
        x = x if x.axes.simple else self.seen(x)
        places, axes = [x.axes.place(d - 1) for d in dims], x.axes
        for d in dims:
            axes = axes.resized(d - 1, 1)
        value = self.emit(lambda p, v: function(v, places, keepdim=True), [x], axes)
        if keepdim:
            return value
        return self.regrouped(value, [size for d, size in enumerate(axes.shape, 1) if d not in dims])

    def _max_pool(
        self, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Value | None:  # fmt: skip
        image = self._map(x)
        sizes = [pair(size) for size in (kernel_size, stride or kernel_size, padding, dilation)]
        if image is None or any(a != b for a, b in sizes) or sizes[3] != (1, 1) or ceil_mode or return_indices:
            return None
        (side, _), (step, _), (border, _), _ = sizes
        channels, rows, columns = x.axes.shape
        axes = Axes.channels_last(channels, *Window(rows, columns, *sizes[:3]).out)
        return self.emit(lambda p, v: layers.max_pool(p, v, side, step, border), [image], axes)

    def _average_pool(self, x: Value, output_size: Any) -> Value | None:
        """Where the whole map becomes one pixel."""
        if output_size not in (1, (1, 1), [1, 1]) or len(x.axes.shape) != 3:
            return None
        return self._reduced(x, torch.mean, (2, 3), True)

    def _on_images(self, node: fx.Node, x: Value, function: Callable[[Tensor], Tensor]) -> Value | None:
        image = self._map(x)
        if image is None:
            return None

        def run(p: Stack, value: Tensor) -> Tensor:
            done = function(value.flatten(0, 1).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            return done.unflatten(0, value.shape[:2])

        channels, rows, columns = self.result_shape(node)
        return self.emit(run, [image], Axes.channels_last(channels, rows, columns))

    def _general(self, node: fx.Node, layer: nn.Module | None, arguments: Any, options: Any) -> Value:
        """Any other operation: on what it takes of one client, under vmap; or as it is, where it takes no tensor."""
        own: dict[str, Value] = {}
        if layer is not None:
            own = {name: self._parameter(self.names[id(t)], t) for name, t in tensors(layer).items()}
        separate = copy.deepcopy(layer)
        target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        reads: list[Value] = []

        def numbered(value: Any) -> Any:
            if not isinstance(value, Value):
                return value
            reads.append(self.seen(value) if value.kind == "batch" else value)
            return _Place(len(reads) - 1)

        own_places, placed = _mapped(own, numbered), _mapped((arguments, options), numbered)
        mapped = [i for i, value in enumerate(reads) if value.kind != "other"]

        def run(p: Stack, *held: Any) -> Any:
            def call(*tensors: Any) -> Any:
                given = dict(enumerate(held)) | dict(zip(mapped, tensors, strict=True))
                a, o = _mapped(placed, lambda v: given[v.index] if isinstance(v, _Place) else v)
                parameters = _mapped(own_places, lambda v: given[v.index] if isinstance(v, _Place) else v)
                return target(*a, **o) if separate is None else functional_call(separate, parameters, a, o)

            if not mapped:
                return call()
            with p.draws or nullcontext():
                return vmap(call, randomness="different")(*(held[i] for i in mapped))

        return self.new(run, reads, **self._result_kind(node, reads))

    def _result_kind(self, node: fx.Node, reads: Sequence[Value]) -> dict[str, Any]:
        kinds = {value.kind for value in reads}
        result = self.graph.probes[0][node]
        if kinds & {"batch", "any"}:
            if not has_shapes(result):
                return {"kind": "other"}
            shape = self._without_batch(node)
            return {"kind": "any"} if shape is None else {"kind": "batch", "axes": Axes.plain(shape)}
        if "parameter" in kinds and isinstance(result, Shape):
            return {"kind": "parameter", "shape": result.sizes}
        return {"kind": "other"}


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes in the arguments of an operation."""

    index: int


def _mapped(structure: Any, function: Callable[[Any], Any]) -> Any:
    """The structure with the function applied to all that is not a list, tuple, slice or dictionary."""
    if isinstance(structure, dict):
        return {name: _mapped(value, function) for name, value in structure.items()}
    if isinstance(structure, torch.Size):
        return structure
    if isinstance(structure, (list, tuple)):
        return type(structure)(_mapped(value, function) for value in structure)
    if isinstance(structure, slice):
        return slice(*(_mapped(v, function) for v in (structure.start, structure.stop, structure.step)))
    return function(structure)


def _has_values(structure: Any) -> bool:
    found = False

    def look(value: Any) -> None:
        nonlocal found
        found = found or isinstance(value, Value)

    _mapped(structure, look)
    return found


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
