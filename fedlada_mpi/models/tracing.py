"""The operations of a module: traced with ``torch.fx``, and tried on two batches for the shapes that they give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..support.errors import first_line
from .trial import tensors

PROBES = (3, 2)  # images of two batches that tell what depends on their number


class NotTraceable(Exception):
    """The message names what is in the way."""


@contextmanager
def mode_of(module: nn.Module, training: bool) -> Iterator[None]:
    """As users expect of their module: Dropout acts in training, and not in evaluation."""
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


# torch.fx replaces methods of nn.Module while it traces.
_tracing = threading.Lock()


class _Tracer(fx.Tracer):
    """Leaves torch's own layers whole, and remembers the layer that could not be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.in_the_way = ""

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.in_the_way = self.in_the_way or f"{self.path_of_module(m)} ({type(m).__name__})"
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class Graph:
    """The operations of a module, and the shapes that they give for the probes."""

    def __init__(self, module: nn.Module, image_shape: tuple[int, int, int], names: dict[int, str]):
        self.module, self.image_shape, self.names = module, image_shape, names
        tracer = _Tracer()
        try:
            with _tracing:
                self.graph = tracer.trace(module)
        except Exception as error:
            where = tracer.in_the_way or type(module).__name__
            raise NotTraceable(f"{where} cannot be traced: {first_line(error)}") from None
        self.probes = [self._probe(images) for images in PROBES]

    def _probe(self, images: int) -> dict[fx.Node, Any]:
        rows, columns, channels = self.image_shape
        kind = next((t.dtype for t in self.module.parameters() if t.is_floating_point()), torch.float32)
        recorder = _Recorder(fx.GraphModule(self.module, self.graph))
        with torch.no_grad():
            recorder.run(torch.zeros(images, channels, rows, columns, dtype=kind))
        return recorder.results

    def parameter(self, target: str) -> str | None:
        """The name of the parameter or buffer that an attribute is."""
        owner, _, attribute = target.rpartition(".")
        return self.names.get(id(getattr(self.module.get_submodule(owner), attribute)))

    def uses(self) -> dict[str, int]:
        """How often each parameter or buffer is used."""
        count: dict[str, int] = {}
        for node in self.graph.nodes:
            if node.op == "call_module":
                layer = self.module.get_submodule(node.target)
                used, times = [self.names[id(value)] for value in tensors(layer).values()], 1
            elif node.op == "get_attr" and (name := self.parameter(node.target)) is not None:
                used, times = [name], len(node.users)
            else:
                continue
            for name in used:
                count[name] = count.get(name, 0) + times
        return count


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
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
    if isinstance(result, Tensor):
        return Shape(tuple(result.shape))
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        return tuple(map(_shapes, result))
    return result


def has_shapes(result: Any) -> bool:
    return isinstance(result, Shape) or (isinstance(result, tuple) and any(map(has_shapes, result)))
