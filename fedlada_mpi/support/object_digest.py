"""A digest of a class, a function or a module as it is in memory: of a notebook's cell, or within a function.

It covers the bytecode with its constants and names, nested code, defaults, what a closure holds, base classes, and the
functions, classes, modules and values that the code takes from around it, as far as they are the user's own. It is the
same in every process of one version of Python. Comments do not change it, and neither does a file that was edited
after it was imported, as its source would.
"""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import hashlib
import importlib.util
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from operator import attrgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from .user_code import is_library

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_CONTAINERS = (dict, OrderedDict, MappingProxyType, list, tuple, set, frozenset)
_CACHES = (WeakKeyDictionary, WeakValueDictionary)  # what they hold depends on what has been called
# Of a class: what Python adds, and what does not act.
_ADDED = (
    *("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    "__slotnames__",  # by the first copy of an instance
)
# Under which methods, properties, partial functions and the like hold functions and what these are called with.
_WRAPPED = ("__wrapped__", "__func__", "__self__", "func", "args", "keywords", "fget", "fset", "fdel")
_OF_LAYERS = (tuple, list, FunctionType, BuiltinFunctionType)  # what a library's layers hold of a user's
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
_OF_VALUES = {*sys.stdlib_module_names, "numpy", "torch"}  # libraries whose values say all about themselves


def object_digest(value: Any, of_module: Callable[[str], Mapping[str, str]]) -> str:
    """``of_module`` has the digests of a module's files; none of a library's."""
    lines = _Description(of_module, {}).of(value)
    return hashlib.sha256("\n".join(lines).encode("utf8", "backslashreplace")).hexdigest()


class _Description:
    """Lines that say all that a value does."""

    def __init__(self, of_module: Callable[[str], Mapping[str, str]], seen: Mapping[int, tuple[int, Any]]):
        self.of_module = of_module
        self.seen = dict(seen)  # with the values, so that no other gets the same id

    def of(self, value: Any) -> Iterator[str]:
        if type(value) in _PLAIN:
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
            yield from self._module(value)
        elif isinstance(value, (np.ndarray, np.generic)) or _is_torch(value, "Tensor"):
            yield from self._array(value)
        elif isinstance(value, _CACHES):
            yield type(value).__qualname__
        else:
            yield from self._contents(value)
            if type(value) not in _CONTAINERS:
                yield from self._instance(value)

    def _contents(self, value: Any) -> Iterator[str]:
        """Of containers and numbers, those of a user's own classes too."""
        if isinstance(value, _PLAIN):
            yield repr(value)
        elif isinstance(value, Mapping):
            yield f"mapping of {len(value)}"
            for key, item in value.items():
                yield from self.of(key)
                yield from self.of(item)
        elif isinstance(value, (set, frozenset)):
            # One by one, as their order is another in every process.
            yield f"set of {len(value)}"
            yield from sorted("".join(_Description(self.of_module, self.seen).of(item)) for item in value)
        elif isinstance(value, (list, tuple)):
            yield f"{type(value).__name__} of {len(value)}"
            for item in value:
                yield from self.of(item)

    def _array(self, value: Any) -> Iterator[str]:
        """Numbers of numpy or torch, such as the weights of classes."""
        found = _as_numpy(value) if _is_torch(value, "Tensor") else np.asarray(value)
        yield f"{value.dtype} {tuple(value.shape)}"
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
        if own := {name: value for name, value in vars(function).items() if name[0] != "_"}:
            yield from self.of(own)
        for name in sorted(_globals(code)):
            yield from self._global(function.__globals__, name.split("."))
        for name in sorted(_imported(code, function.__globals__.get("__package__") or "")):
            yield from self._files(name)

    def _global(self, names: Mapping[str, Any], path: list[str]) -> Iterator[str]:
        """What a dotted name leads to, if it is no more than a name, or a module of the user's in another."""
        first, *rest = path
        if first not in names:
            return
        value = names[first]
        if not rest:
            yield first
            yield from self.of(value)
        for part in rest:
            value = getattr(value, part, None) if isinstance(value, ModuleType) else None
        if rest and isinstance(value, ModuleType):
            yield from self._files(value.__name__)

    def _module(self, module: ModuleType) -> Iterator[str]:
        yield f"module {module.__name__}"
        yield from self._files(module.__name__)

    def _files(self, module: str) -> Iterator[str]:
        if files := self.of_module(module):
            yield repr(sorted(files.items()))

    def _class(self, cls: type) -> Iterator[str]:
        yield f"{cls.__module__}.{cls.__qualname__}"
        if self._of_library(cls.__module__) and not _made(cls):
            return
        for base in (*cls.__bases__, *([] if type(cls) is type else [type(cls)])):
            yield from self.of(base)
        for name, value in sorted(vars(cls).items()):
            if name not in _ADDED:
                yield name
                yield from self.of(value)

    def _instance(self, value: Any) -> Iterator[str]:
        """Of a torch module its layers; of any other object its class, what it wraps, and what it holds."""
        cls = type(value)
        yield from self.of(cls)
        if cls.__module__ in ("builtins", "functools"):
            for name in _WRAPPED:
                yield from self.of(getattr(value, name, None))
        if _is_torch(value, "nn.Module"):
            yield _ADDRESS.sub("", repr(value))
            for name, layer in value.named_modules():
                yield name
                yield from self._layer(layer)
        elif dataclasses.is_dataclass(value) or not self._of_library(cls.__module__):
            for name, item in sorted(_attributes(value).items()):
                yield name
                yield from self.of(item)
        elif cls.__module__.partition(".")[0] in _OF_VALUES:
            yield from self._reduced(value)

    def _layer(self, layer: Any) -> Iterator[str]:
        """What a layer does with its parameters: a loss, unlike most layers, does not show Huber's delta."""
        yield from self.of(type(layer))
        settings = {name: item for name, item in vars(layer).items() if name[0] != "_" and name != "training"}
        yield repr(sorted((name, item) for name, item in settings.items() if isinstance(item, _PLAIN)))
        kinds = _OF_LAYERS if self._of_library(type(layer).__module__) else object
        for name, item in sorted(settings.items()):
            # A tensor that is no buffer may be one of the last batch.
            if not isinstance(item, _PLAIN) and isinstance(item, kinds) and not _is_torch(item, "Tensor"):
                yield name
                yield from self.of(item)
        if not hasattr(layer, "track_running_stats"):  # which are of data
            for name, buffer in layer.named_buffers(recurse=False):
                yield name
                yield from self.of(buffer)

    def _reduced(self, value: Any) -> Iterator[str]:
        """What ``pickle`` would store of a value of a library, such as a range, a dtype or a function in C."""
        try:
            reduced = copyreg.dispatch_table.get(type(value), lambda it: it.__reduce_ex__(4))(value)
        except Exception:  # whatever a lock or an open file raises
            return
        if isinstance(reduced, str):
            yield reduced
        elif "__eq__" in _names(type(value)) or type(value).__module__ in ("builtins", "operator"):
            function, arguments, state, *items = (*reduced, None, None, None)[:5]
            yield from self.of((function, arguments, state, *(None if each is None else [*each] for each in items)))

    def _of_library(self, module: str) -> bool:
        found = sys.modules.get(module)
        file = getattr(found, "__file__", None)
        # A folder without __init__.py has no file.
        places = [file] if file else [*getattr(found, "__path__", ())]
        return module != "__main__" and all(is_library(place) for place in places)


def _is_torch(value: Any, kind: str) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, attrgetter(kind)(torch))


def _as_numpy(tensor: Any) -> np.ndarray:
    try:
        dense = tensor.detach().cpu().to_dense()
        return np.asarray(dense.double() if dense.is_floating_point() else dense)
    except (TypeError, RuntimeError):  # one without values, or of a type that numpy does not have
        return np.empty(0)


def _attributes(value: Any) -> dict[str, Any]:
    """All that an object holds, in slots too, but for what its methods have cached."""
    found = dict(getattr(value, "__dict__", {}))
    for name in [name for name in found if isinstance(getattr(type(value), name, None), cached_property)]:
        del found[name]
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and "__slots__" in vars(cls) and hasattr(value, name):
                found[name] = member.__get__(value)
    return found


def _names(cls: type) -> set[str]:
    """What a class has of its own and of its bases, but for what every object has."""
    return {name for base in cls.__mro__ if base is not object for name in vars(base)}


def _made(cls: type) -> bool:
    """Whether a class only has the name of a function or class of a library, as a task that is made of functions."""
    if "<locals>" in cls.__qualname__ or cls.__module__ not in sys.modules:
        return False
    try:
        return attrgetter(cls.__qualname__)(sys.modules[cls.__module__]) is not cls
    except AttributeError:
        return False


def _globals(code: CodeType) -> set[str]:
    """The names that code and the code within it take from their module, and dotted ones within what these name."""
    names, name = set(), ""
    for step in dis.get_instructions(code):
        if step.opname in _LOADS:
            name = step.argval
        elif name and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = f"{name}.{step.argval}"
        elif step.opname != "EXTENDED_ARG":
            name = ""
        if name:
            names.add(name)
    return names.union(*(_globals(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def _imported(code: CodeType, package: str) -> set[str]:
    """The modules that code and the code within it may import."""
    names: set[str] = set()
    module, before = "", (0, 0)
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            module = _absolute(step.argval, before[0], package)
            names.add(module)
        elif step.opname == "IMPORT_FROM":
            names.add(f"{module}.{step.argval}")
        before = before[1], step.argval
    within = (_imported(constant, package) for constant in code.co_consts if isinstance(constant, CodeType))
    return names.union(*within) - {""}


def _absolute(name: str, level: Any, package: str) -> str:
    try:
        return importlib.util.resolve_name("." * level + name, package) if level else name
    except ImportError:  # which the import will report
        return ""
