"""The operations that stacked layers have: each adds its step to a program.

Common layers become those of ``layers.py``; operations without parameters act on all clients at once. A layer of torch
is the function that it calls, so ``F.conv2d`` stands for ``nn.Conv2d`` too. A method that returns None has no step for
these arguments; ``general.py`` may then have one.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from . import added_norm, layers, low_rank
from .attention import attention
from .axes import Axes
from .client_axis import ELEMENTWISE
from .columns import Window, pair
from .fuse_steps import ADDITIONS, FusableStep, Fusion, activation_of
from .general import RESHAPING, General, filled, gives_large_outputs, is_batch, picked, values_in
from .layers import ACTIVATIONS
from .layout import Kernel
from .low_rank import AdaptedLayer
from .parameters import tensors
from .program import Run, Step, Value
from .recurrent import recurrent
from .recurrent_dropout import is_recurrent
from .resample import repeatable
from .stack import Stack
from .tracing import Graph, NotTraceable, described, has_hooks, operation

BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(ADDITIONS, torch.add),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub", "sub_"), torch.sub),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), torch.mul),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div, "div", "div_"), torch.div),
}
REDUCING: dict[Any, Any] = {torch.mean: torch.mean, "mean": torch.mean, torch.sum: torch.sum, "sum": torch.sum}
RESHAPING_IMAGES: set[Any] = {*RESHAPING, torch.unsqueeze, "unsqueeze", "contiguous", "clone"}
# What acts on every image by itself, and takes images in any order of memory.
ON_IMAGES: set[Any] = {F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.interpolate}


class Operations(General):
    """Adds the steps of a graph's operations to a program, and notes how these store the weights of products."""

    def __init__(self, graph: Graph, shared: set[str], general: bool = True):
        super().__init__(graph, general)
        self.shared = shared
        self.fusion = Fusion()
        self.parameters: dict[str, Value] = {}
        self.kernels: dict[str, Kernel] = {}
        self.groups: dict[str, int] = {}
        self.dead: dict[str, list[int]] = {}
        # Adapted layers with activations that only one operation uses, what they take, and their steps, by slots.
        self.activated: dict[int, tuple[AdaptedLayer, str, Value, Step]] = {}
        # Convolutions that a pooling may join, by slots: their steps, what they read, and how they run with it.
        self.poolable: dict[int, tuple[Step, Value, Callable[..., Tensor]]] = {}
        self.additions: dict[int, Step] = {}  # of two tensors of one shape, by the slot of their sum

    def stacked(self, node: fx.Node, arguments: Any, options: dict[str, Any]) -> Any:
        """The value of a node by stacked layers, or by one operation for all clients.

        None if there is no such way, or if the step waits for the operation behind it.
        """
        layer, function = self.graph.layer(node), operation(node)
        if function in (operator.getitem, getattr) and isinstance(arguments[0], (tuple, list)):
            return picked(*arguments)
        if is_recurrent(layer):
            return self.recurrent(node, layer, *arguments, **options)
        if layer is not None:
            return self.whole_layer(node, layer, *arguments) if len(arguments) == 1 and not options else None
        options = {name: value for name, value in options.items() if name != "inplace"}
        if function in BINARY and len(arguments) == 2 and not options:
            return self.binary(BINARY[function], *arguments)
        if function is torch.cat or function is torch.concat:
            return self.cat(node, *arguments, **options)
        if function is F.scaled_dot_product_attention:
            return self.attention(node, *arguments, **options)
        x, *others = arguments or [None]
        if function is F.dropout and isinstance(x, Value) and x.kind in ("any", "parameter"):
            return self.dropout(node, x, *others, **options)
        if not is_batch(x):
            return None
        if function in OPERATIONS:
            return OPERATIONS[function](self, node, x, *others, **options)
        if getattr(function, "__module__", "") == "torchvision.ops.stochastic_depth":
            return self.stochastic_depth(x, *others, **options)
        if function in RESHAPING_IMAGES:
            shape = self.graph.activation_shape(node)
            return self.regrouped(x, shape) if shape is not None and prod(shape) == prod(x.axes.shape) else None
        if function is getattr and others == ["shape"]:
            return self.size(node, x)
        if values_in((others, options)):
            return None
        if function in ELEMENTWISE:
            run = ELEMENTWISE[function]
            return self.emit(lambda p, value: run(value, *others, **options), [x], x.axes)
        if function in REDUCING:
            return self.reduce(x, REDUCING[function], *others, **options)
        if function in ON_IMAGES and not options.get("return_indices"):
            pool = POOLING.get(function)
            pooled = None if pool is None else pool(self, node, x, *others, **options)
            on_maps = repeatable(function)
            return pooled or self.on_images(node, x, lambda images: on_maps(images, *others, **options))
        return None

    def result_shape(self, node: fx.Node) -> tuple[int, ...]:
        """Of activations, without the batch."""
        shape = self.graph.activation_shape(node)
        if shape is None:
            raise NotTraceable(f"{described(node)} moves or mixes the examples of a batch")
        return shape

    # Parameters.

    def parameter(self, name: str) -> Value:
        """One value for all uses, so that autograd adds up their gradients."""
        tensor = self.graph.tensors[name]
        kind = "parameter" if tensor.requires_grad else "constant"
        return self.parameters.setdefault(name, Value(-1, kind, shape=tuple(tensor.shape), name=name))

    def parameters_of(self, layer: nn.Module) -> dict[str, Value]:
        """The parameters and buffers of a layer, by its own names for them."""
        return {name: self.parameter(self.graph.names[id(t)]) for name, t in tensors(layer).items()}

    def used_name(self, parameter: Value | None) -> str | None:
        """The name of a parameter that a stacked layer uses."""
        if parameter is None:
            return None
        self.used.add(parameter.name)
        return parameter.name

    def used_once(self, *values: Any) -> bool:
        """Whether each is a parameter that nothing else uses, or none: stacked layers do not add up gradients."""
        return all(v is None or (isinstance(v, Value) and v.name and v.name not in self.shared) for v in values)

    # Layers with parameters.

    def whole_layer(self, node: fx.Node, layer: nn.Module, x: Any) -> Value | None:
        """A layer of torch that is more, or less, than one operation."""
        if not is_batch(x) or has_hooks(layer):
            return None
        if type(layer) is nn.Identity:
            return x
        if type(layer) is nn.InstanceNorm2d and not layer.track_running_stats:
            return self.group_norm(node, x, x.axes.shape[0], **self.parameters_of(layer), eps=layer.eps)
        return None

    def recurrent(self, node: fx.Node, layer: Any, x: Any, hx: Any = None) -> Any:
        if has_hooks(layer) or layer.proj_size or not isinstance(x, Value) or x.kind not in ("batch", "any"):
            return None
        dropout = layer.dropout if layer.training else 0.0
        reads, places = self.placed((self.parameters_of(layer), x, hx))

        def run(p: Stack, *held: Any) -> Any:
            def drop(value: Tensor) -> Tensor:
                with p.draws or nullcontext():
                    return F.dropout(value, dropout) if dropout else value

            parameters, inputs, initial = filled(places, held)
            return recurrent(layer, parameters, inputs, initial, drop, p.on_gpu, p.kernels)

        return self.results(node, run, reads)

    def conv1d(
        self, node: fx.Node, x: Value, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Value | None:  # fmt: skip
        """A map with one row."""
        if len(x.axes.shape) != 2 or dilation not in (1, (1,), [1]) or not self.used_once(weight, bias):
            return None
        if weight.kind == "constant":
            return None
        (step,), (border,) = (value if isinstance(value, (tuple, list)) else (value,) for value in (stride, padding))
        channels, columns = x.axes.shape
        out, _, width = weight.shape
        if border == "same" and width % 2 == 0:
            return None
        if isinstance(border, str):
            border = width // 2 if border == "same" else 0
        image = self._map(self.regrouped(x, (channels, 1, columns)))
        if image is None:
            return None
        window = Window(1, columns, (1, width), (step, step), (0, border))
        return self._convolution(node, image, weight, bias, window, groups, (out, window.out[1]))

    def conv(
        self, node: fx.Node, x: Value, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Value | None:  # fmt: skip
        image = self._map(x)
        if image is None or not self.used_once(weight, bias):
            return None
        _, rows, columns = x.axes.shape
        out, _, *kernel = weight.shape
        if padding == "valid":
            padding = 0
        if padding == "same":
            reach = [d * (k - 1) for d, k in zip(pair(dilation), kernel, strict=True)]
            if any(r % 2 for r in reach):
                return None
            padding = [r // 2 for r in reach]
        window = Window(rows, columns, pair(kernel), pair(stride), pair(padding), pair(dilation))
        return self._convolution(node, image, weight, bias, window, groups, (out, *window.out))

    def _convolution(
        self, node: fx.Node, image: Value, weight: Value, bias: Any, window: Window, groups: int, shape: Sequence[int]
    ) -> Value | None:
        """Of a map; its outputs are seen in this shape."""
        channels, (out, inner, *_) = image.axes.shape[0], weight.shape
        self.kernels[weight.name] = (out, inner, *window.kernel)
        if 1 < groups < channels or (groups == channels > 1 and out != channels):
            self.groups[weight.name] = groups
        if groups == 1 and window.dead:
            self.dead[weight.name] = window.dead
        axes = Axes.channels_last(out, *window.out)
        return self._product(
            node, image, weight, bias, axes,
            lambda p, v, w, b, activation: layers.conv(p, v, w, b, window, groups, activation), shape,
            lambda p, v, w, b, activation, pool: layers.pooled_conv(p, v, w, b, window, groups, activation, pool),
            window if groups == 1 and window.keeps_size else None,
        )  # fmt: skip

    def linear(self, node: fx.Node, x: Value, weight: Any, bias: Any = None) -> Value | None:
        if not self.used_once(weight, bias) or weight.kind == "constant" or gives_large_outputs(node, weight):
            return None
        out, inner = weight.shape
        axes, last = x.axes, len(x.axes.shape) - 1
        kernel: Kernel = (out, inner, 1, 1)
        if last == 0 and axes.parts == (3,) and axes.order == (1, 2, 0):
            kernel = (out, axes.sizes[0], axes.sizes[1], axes.sizes[2])  # over a flattened map
            x = self.emit(lambda p, value: value.flatten(2), [x], Axes.plain((inner,)))
        x = self._last_axis_last(x)
        self.kernels[weight.name] = kernel
        return self._product(node, x, weight, bias, x.axes.resized(last, out), layers.linear)

    def adapted(
        self, node: fx.Node, x: Value, weight: Any, bias: Any, a: Any, b: Any, scale: float, transposed: bool
    ) -> Value | None:
        base = [v for v in (weight, bias) if v is not None]
        if not self.used_once(a, b) or any(not v.name or v.kind != "constant" for v in base):
            return None
        x, last = self._last_axis_last(x), len(x.axes.shape) - 1
        names = (weight.name, None if bias is None else bias.name, str(self.used_name(a)), str(self.used_name(b)))
        layer, axes = AdaptedLayer(*names, scale, transposed), x.axes.resized(last, b.shape[0])
        before = self.activated.pop(x.slot, None)
        if before is not None:
            first, activation, source, step = before
            self.steps = [other for other in self.steps if other is not step]
            return self.emit(lambda p, v: low_rank.pair(p, v, first, activation, layer), [source], axes)
        only = next(iter(node.users)) if len(node.users) == 1 else None
        if only is None or not activation_of(only) or len(only.users) != 1:
            return self.emit(lambda p, v: low_rank.linear(p, v, layer), [x], axes)

        def emit(residual: Value | None, activation: str) -> Value:
            after = ACTIVATIONS[activation]
            value = self.emit(lambda p, v: after(low_rank.linear(p, v, layer)), [x], axes)
            if activation:
                self.activated[value.slot] = (layer, activation, x, self.steps[-1])
            return value

        return self.fusion.add(node, FusableStep(emit))

    def _product(
        self, node: fx.Node, x: Value, weight: Value, bias: Value | None, axes: Axes, run: Callable[..., Tensor],
        shape: Sequence[int] | None = None, pooled: Callable[..., Tensor] | None = None, window: Window | None = None,
    ) -> Value | None:  # fmt: skip
        """A step that may apply the activation behind it; its result is seen in this shape.

        ``pooled``: runs it with a pooling that follows, where it can; ``window``: of a convolution that may be given
        columns.
        """
        w, b = self.used_name(weight), self.used_name(bias)

        def emit(residual: Value | None, activation: str) -> Value:
            value = self.emit(lambda p, v: run(p, v, w, b, activation), [x], axes)
            if window is not None:
                self.convolutions[value.slot] = layers.Reader(weight.name, b, window)
            if pooled is not None and activation in ("", "relu"):
                self.poolable[value.slot] = (self.steps[-1], x, lambda p, v, pool: pooled(p, v, w, b, activation, pool))
            return value if shape is None else self.regrouped(value, shape)

        return self.fusion.add(node, FusableStep(emit))

    def group_norm(
        self, node: fx.Node, x: Value, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Value | None:
        if not x.axes.simple or len(x.axes.shape) not in (1, 3) or not self.used_once(weight, bias):
            return None
        w, b, shape = self.used_name(weight), self.used_name(bias), x.axes.shape
        image = x if len(shape) == 3 else self.regrouped(x, (*shape, 1, 1))
        image = self.arranged(image, (1, 2, 0))

        def emit(residual: Value | None, activation: str) -> Value:
            reads = [image] if residual is None else [image, residual]
            run = partial(_group_norm, weight=w, bias=b, groups=groups, eps=eps, activation=activation)
            value = self.emit(run, reads, image.axes)
            self.norms[value.slot] = run
            return self.regrouped(value, shape)

        if len(shape) != 3:
            return emit(None, "")
        return self.fusion.add(node, FusableStep(emit, layers.NORM_ACTIVATIONS, image.axes))

    def layer_norm(
        self, node: fx.Node, x: Value, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Value | None:
        frozen = [v.kind == "constant" and bool(v.name) for v in (weight, bias) if v is not None]
        if frozen and all(frozen) and len(normalized_shape) == 1:
            w, b = (None if v is None else v.name for v in (weight, bias))
            x = self._last_axis_last(x)
            return self._norm_of_sum(x, added_norm.frozen, added_norm.added_frozen, w, b, eps)
        if not self.used_once(weight, bias) or any(frozen):
            return None
        shape, width = x.axes.shape, prod(normalized_shape)
        x = self.regrouped(x, (*shape[: len(shape) - len(normalized_shape)], width))
        x = self._last_axis_last(x)
        w, b = self.used_name(weight), self.used_name(bias)
        return self.regrouped(self._norm_of_sum(x, layers.layer_norm, added_norm.added_trained, w, b, eps), shape)

    def _norm_of_sum(self, x: Value, norm: Run, added: Run, weight: str | None, bias: str | None, eps: float) -> Value:
        """Over the last axis; an addition that gave x becomes part of the step, which gives both results."""
        addition = self.additions.pop(x.slot, None)
        if addition is None:
            return self.emit(lambda p, v: norm(p, v, weight, bias, eps), [x], x.axes)
        both, normal = (Value(self.slots + i, kind, axes=x.axes) for i, kind in enumerate(("other", "batch")))
        self.slots += 2
        at = next(i for i, step in enumerate(self.steps) if step is addition)
        self.steps[at : at + 1] = [
            Step(lambda p, v, other: added(p, v, other, weight, bias, eps), addition.reads, both.slot),
            Step(lambda p, held: held[0], [both.slot], addition.slot),
            Step(lambda p, held: held[1], [both.slot], normal.slot),
        ]
        return normal

    def rms_norm(
        self, node: fx.Node, x: Value, normalized_shape: Any, weight: Any = None, eps: float | None = None
    ) -> Value | None:
        if len(normalized_shape) != 1 or not self.used_once(weight) or weight is None or weight.kind == "constant":
            return None
        x, width, name = self._last_axis_last(x), tuple(normalized_shape), str(self.used_name(weight))
        return self.emit(lambda p, v: layers.scale(p, F.rms_norm(v, width, None, eps), name), [x], x.axes)

    # Layers without parameters.

    def attention(self, node: fx.Node, *arguments: Any, **options: Any) -> Value:
        reads, places = self.placed((arguments, options))

        def run(p: Stack, *held: Any) -> Tensor:
            a, o = filled(places, held)
            return attention(p, *a, **o)

        value: Value = self.results(node, run, reads)
        return value

    def dropout(self, node: fx.Node, x: Value, p: Any = 0.5, training: Any = True) -> Value:
        """Drawn in the user's order of the elements, so that every engine drops the same ones."""
        if not training or p == 0:
            return x
        axes, atoms = x.axes, Axes.plain(x.axes.sizes)
        if not is_batch(x):

            def as_it_is(stack: Stack, value: Tensor) -> Tensor:
                with stack.draws or nullcontext():
                    return F.dropout(value, p, True)

            return self.new(as_it_is, [x], x.kind, shape=x.shape)

        def run(stack: Stack, value: Tensor) -> Tensor:
            with stack.draws or nullcontext():
                kept = F.dropout(axes.as_seen(value), p, True)
            return atoms.arranged(kept.reshape(*kept.shape[:2], *axes.sizes), axes.order)

        return self.emit(run, [x], axes)

    def feature_dropout(self, node: fx.Node, x: Value, p: Any = 0.5, training: Any = True) -> Value | None:
        """Whole channels are left out."""
        if not training or p == 0:
            return x
        if len(x.axes.shape) < 2 or p == 1:
            return None

        axes, atoms = x.axes, Axes.plain(x.axes.sizes)

        def run(stack: Stack, value: Tensor) -> Tensor:
            value = axes.as_seen(value)
            noise = value.new_empty(*value.shape[:3], *(1,) * (value.dim() - 3))
            with stack.draws or nullcontext():
                noise.bernoulli_(1 - p)
            kept = value * noise.div_(1 - p)
            return atoms.arranged(kept.reshape(*kept.shape[:2], *axes.sizes), axes.order)

        return self.emit(run, [x], axes)

    def stochastic_depth(self, x: Value, p: float, mode: str, training: bool = True) -> Value:
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

    def max_pool(
        self, node: fx.Node, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Value | None:  # fmt: skip
        image = self._map(x)
        sizes = [pair(size) for size in (kernel_size, stride or kernel_size, padding, dilation)]
        if image is None or any(a != b for a, b in sizes) or sizes[3] != (1, 1) or ceil_mode or return_indices:
            return None
        (side, _), (step, _), (border, _), _ = sizes
        channels, rows, columns = x.axes.shape
        axes = Axes.channels_last(channels, *Window(rows, columns, *sizes[:3]).out)
        pool = (side, step, border)
        before = node.args[0] if node.args else None
        if image.slot in self.poolable and isinstance(before, fx.Node) and len(before.users) == 1:
            joined, source, run = self.poolable.pop(image.slot)
            self.steps = [other for other in self.steps if other is not joined]
            return self.emit(lambda p, v: run(p, v, pool), [source], axes)
        return self.emit(lambda p, v: layers.max_pool(p, v, *pool), [image], axes)

    def average_pool(self, node: fx.Node, x: Value, output_size: Any) -> Value | None:
        """Where the whole map becomes one pixel."""
        if output_size not in (1, (1, 1), [1, 1]) or len(x.axes.shape) != 3:
            return None
        return self.reduce(x, torch.mean, (2, 3), True)

    def on_images(self, node: fx.Node, x: Value, function: Callable[[Tensor], Tensor]) -> Value | None:
        image = self._map(x)
        if image is None:
            return None
        axes = Axes.channels_last(*self.result_shape(node))
        return self.emit(lambda p, value: layers.on_images(value, function), [image], axes)

    # Axes.

    def _map(self, x: Value) -> Value | None:
        """Channels last in memory, if it is a map."""
        return self.arranged(x, (1, 2, 0)) if x.axes.simple and len(x.axes.shape) == 3 else None

    def _last_axis_last(self, x: Value) -> Value:
        """With the user's last axis also last in memory."""
        x = x if x.axes.simple else self.seen(x)
        last = len(x.axes.shape) - 1
        return self.arranged(x, [*(atom for atom in x.axes.order if atom != last), last])

    def permute(self, node: fx.Node, x: Value, *dims: Any, **options: Any) -> Value | None:
        if options:
            return None
        return self._in_order(x, dims[0] if isinstance(dims[0], (list, tuple)) else dims)

    def transpose(self, node: fx.Node, x: Value, *dims: int, **options: Any) -> Value | None:
        if options:
            return None
        order = list(range(len(x.axes.shape) + 1))
        a, b = dims
        order[a], order[b] = order[b], order[a]
        return self._in_order(x, order)

    def _in_order(self, x: Value, dims: Sequence[int]) -> Value | None:
        """The same memory with the user's axes in another order, the batch first."""
        batch, *order = [d % (len(x.axes.shape) + 1) for d in dims]
        if batch != 0:
            return None
        value = copy.copy(x)
        value.axes = x.axes.permuted([d - 1 for d in order])
        return value

    def size(self, node: fx.Node, x: Value, dim: int | None = None) -> Value:
        """The batch is known only when the program runs."""
        shape = x.axes.shape

        def run(p: Stack, value: Tensor) -> Any:
            sizes = torch.Size((value.shape[1], *shape))
            return sizes if dim is None else sizes[dim]

        return self.new(run, [x], "other")

    # Arithmetic.

    def binary(self, function: Callable[[Any, Any], Any], a: Any, b: Any) -> Value | None:
        batches = [is_batch(v) for v in (a, b)]
        if all(batches):
            if a.axes != b.axes:
                if not (a.axes.simple and b.axes.simple) or len(a.axes.shape) != len(b.axes.shape):
                    return None
                b = self.arranged(b, a.axes.order)
            sizes = tuple(max(pair) for pair in zip(a.axes.sizes, b.axes.sizes, strict=True))
            value = self.emit(lambda p, x, y: function(x, y), [a, b], Axes(sizes, a.axes.parts, a.axes.order))
            if function is torch.add and a.axes == b.axes:
                self.additions[value.slot] = self.steps[-1]
            return value
        x, other = (a, b) if batches[0] else (b, a)
        if not is_batch(x):
            return None
        turned = function if batches[0] else lambda first, second: function(second, first)
        if isinstance(other, (int, float)):
            return self.emit(lambda p, value: turned(value, other), [x], x.axes)
        if not isinstance(other, Value) or other.kind not in ("parameter", "constant") or not x.axes.simple:
            return None
        axes, rank, shape = x.axes, len(x.axes.shape), other.shape
        shape = shape[1:] if len(shape) == rank + 1 and shape[0] == 1 else shape
        shape = (1,) * (rank - len(shape)) + tuple(shape)
        if len(shape) != rank or any(s not in (1, size) for s, size in zip(shape, axes.shape, strict=True)):
            return None
        along = [axis for axis, size in enumerate(shape) if size == axes.shape[axis] and size > 1]
        if function is torch.mul and len(along) == 1 and axes.order[-1] == along[0] and self.used_once(other):
            name = str(self.used_name(other))
            return self.emit(lambda p, value: layers.scale(p, value, name), [x], axes)
        plain = Axes.plain(shape)

        def with_parameter(p: Stack, value: Tensor, parameter: Tensor) -> Tensor:
            return turned(value, plain.arranged(parameter.reshape(-1, 1, *shape), axes.order))

        return self.emit(with_parameter, [x, self.with_clients(other) if other.kind == "constant" else other], axes)

    def cat(self, node: fx.Node, values: Any, dim: int = 0, axis: int | None = None) -> Value | None:
        if not all(map(is_batch, values)):
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

    def reduce(self, x: Value, function: Any, dim: Any = None, keepdim: bool = False) -> Value | None:
        rank = len(x.axes.shape) + 1
        dims = sorted(d % rank for d in ([dim] if isinstance(dim, int) else dim or [0]))
        if dims[0] == 0:
            return None
        x = x if x.axes.simple else self.seen(x)
        places, axes = [x.axes.place(d - 1) for d in dims], x.axes
        for d in dims:
            axes = axes.resized(d - 1, 1)
        alone = axes == x.axes  # one element each, which is its own sum and mean
        value = x if alone else self.emit(lambda p, v: function(v, places, keepdim=True), [x], axes)
        if keepdim:
            return value
        return self.regrouped(value, [size for d, size in enumerate(axes.shape, 1) if d not in dims])


OPERATIONS: dict[Any, Callable[..., Value | None]] = {
    F.conv1d: Operations.conv1d,
    F.conv2d: Operations.conv,
    F.linear: Operations.linear,
    low_rank.adapted: Operations.adapted,
    F.group_norm: Operations.group_norm,
    F.layer_norm: Operations.layer_norm,
    **({F.rms_norm: Operations.rms_norm} if hasattr(F, "rms_norm") else {}),
    F.dropout: Operations.dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), Operations.feature_dropout),
    **dict.fromkeys((torch.permute, "permute"), Operations.permute),
    **dict.fromkeys((torch.transpose, "transpose"), Operations.transpose),
    "size": Operations.size,
}
POOLING: dict[Any, Callable[..., Value | None]] = {
    F.max_pool2d: Operations.max_pool,
    F.adaptive_avg_pool2d: Operations.average_pool,
}


def _group_norm(
    p: Stack, x: Tensor, residual: Tensor | None = None, *, weight: str | None, bias: str | None, groups: int,
    eps: float, activation: str, twice: bool = False, reader: layers.Reader | None = None,
) -> Any:  # fmt: skip
    return layers.norm(p, x, weight, bias, groups, eps, residual, activation, twice, reader)
