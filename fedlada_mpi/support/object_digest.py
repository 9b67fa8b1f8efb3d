"""A digest of a class, a function or a module as it is in memory: of a notebook's cell, or within a function.

It covers the bytecode with its constants and names, nested code, defaults, what a closure holds, base classes, and the
functions, classes and plain values that the code takes from around it, as far as they are the user's own. It is the
same in every process of one version of Python. Comments do not change it, and neither does a file that was edited
after it was imported, as its source would.
"""

from __future__ import annotations

import dataclasses
import dis
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from .user_code import is_library

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
# Of a class: what Python adds, and what does not act.
_ADDED = (
    *("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
)

# Under which methods, properties, partial functions and the like hold functions and what these are called with.
_WRAPPED = ("__wrapped__", "__func__", "__self__", "func", "args", "keywords", "fget", "fset", "fdel")


def object_digest(value: Any, of_module: Callable[[str], Mapping[str, str]]) -> str:
    """``of_module`` has the digests of a module's files."""
    lines = _Description(of_module).of(value)
    return hashlib.sha256("\n".join(lines).encode("utf8", "backslashreplace")).hexdigest()


class _Description:
    """Lines that say all that a value does."""

    def __init__(self, of_module: Callable[[str], Mapping[str, str]]):
        self.of_module = of_module
        self.seen: dict[int, tuple[int, Any]] = {}  # with the values, so that no other gets the same id

    def of(self, value: Any) -> Iterator[str]:
        if isinstance(value, _PLAIN):
            yield repr(value)
        elif isinstance(value, (tuple, frozenset, CodeType)):
            yield from self._once(value)  # whether two equal ones are the same depends on how they were loaded
        elif id(value) in self.seen:
            yield f"again {self.seen[id(value)][0]}"
        else:
            self.seen[id(value)] = len(self.seen), value
            yield from self._once(value)

    def _once(self, value: Any) -> Iterator[str]:
        if isinstance(value, CodeType):
            yield from self._code(value)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, ModuleType):
            yield f"module {value.__name__}"
            if not self._of_library(value.__name__):
                yield repr(sorted(self.of_module(value.__name__).items()))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield from self.of(key)
                yield from self.of(item)
        elif isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "untyped_storage"):
            yield from self._array(value)
        elif isinstance(value, (set, frozenset)):
            yield from sorted("".join(_Description(self.of_module).of(item)) for item in value)
        elif isinstance(value, (list, tuple)):
            yield f"{type(value).__name__} of {len(value)}"
            for item in value:
                yield from self.of(item)
        else:
            yield from self._instance(value)

    def _array(self, value: Any) -> Iterator[str]:
        """Numbers of numpy or torch, such as the weights of classes."""
        found = np.asarray(value.detach().cpu().double() if hasattr(value, "untyped_storage") else value)
        yield f"{value.dtype} {found.shape}"
        if found.dtype.hasobject:
            yield from self.of(found.tolist())
        else:
            yield hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()

    def _code(self, code: CodeType) -> Iterator[str]:
        yield code.co_code.hex()
        yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount))
        for constant in code.co_consts:
            yield from self.of(constant)

    def _function(self, function: FunctionType) -> Iterator[str]:
        for cell in function.__closure__ or ():  # also of a library's decorator, which holds the user's function
            try:
                yield from self.of(cell.cell_contents)
            except ValueError:  # not set yet
                yield "empty"
        code = function.__code__
        if is_library(code.co_filename):
            yield f"{function.__module__}.{function.__qualname__}"
            return
        yield from self.of((code, function.__defaults__, function.__kwdefaults__))
        for name in sorted(_globals(code)):
            if name in function.__globals__:
                yield name
                yield from self.of(function.__globals__[name])

    def _class(self, cls: type) -> Iterator[str]:
        yield f"{cls.__module__}.{cls.__qualname__}"
        if self._of_library(cls.__module__) and not _made(cls):
            return
        for base in cls.__bases__:
            yield from self.of(base)
        for name, value in sorted(vars(cls).items()):
            if name not in _ADDED:
                yield name
                yield from self.of(value)

    def _instance(self, value: Any) -> Iterator[str]:
        """Of a torch module its layers; of any other object its class, what it wraps, and what it holds."""
        yield from self.of(type(value))
        if type(value).__module__ in ("builtins", "functools"):
            for name in _WRAPPED:
                yield from self.of(getattr(value, name, None))
        layers = getattr(value, "named_modules", None)
        if callable(layers):
            yield repr(value)
            for name, layer in layers():
                yield name
                yield from self.of(type(layer))
                # Which a loss, unlike most layers, does not show: Huber's delta.
                plain = {key: item for key, item in vars(layer).items() if isinstance(item, _PLAIN) and key[0] != "_"}
                yield repr(sorted((key, item) for key, item in plain.items() if key != "training"))
        elif dataclasses.is_dataclass(value) or not self._of_library(type(value).__module__):
            for name, item in sorted(getattr(value, "__dict__", {}).items()):
                yield name
                yield from self.of(item)

    def _of_library(self, module: str) -> bool:
        file = getattr(sys.modules.get(module), "__file__", None)
        return module != "__main__" and (file is None or is_library(file))


def _made(cls: type) -> bool:
    """Whether a class only has the name of a function or class of a library, as a task that is made of functions."""
    if "<locals>" in cls.__qualname__ or cls.__module__ not in sys.modules:
        return False
    try:
        return attrgetter(cls.__qualname__)(sys.modules[cls.__module__]) is not cls
    except AttributeError:
        return False


def _globals(code: CodeType) -> set[str]:
    """The names that code and the code within it take from their module."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_globals(constant) for constant in code.co_consts if isinstance(constant, CodeType)))
