"""What the class of a user's own method says about itself: names that a round would never ask for are found here."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cached_property, partial
from types import CodeType, FunctionType
from typing import Any

from ..settings import Setting
from ..support.errors import UserError, shortened
from .base import Algorithm

PER_CLIENT = ("x", "g", "g1", "full_g", "k", "steps", "compute_copy")
KINDS = ("down", "derived", "private", "up", "uniform", "scalars", "slots", "client_state")
CLOSE = 0.75  # of two names, as difflib measures it
LOCAL = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF")  # instructions that read local variables
# Of torch's functions and methods. A method with one of them may draw in some rounds only.
RANDOM = {
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "normal", "normal_", "uniform_"),
    *("bernoulli", "bernoulli_", "exponential_", "dropout", "sample", "rsample"),
}


def check_declarations(a: Algorithm) -> None:
    """Raise ``UserError`` where what a method declares contradicts itself."""
    for kind in KINDS:
        names = getattr(a, kind)
        if not isinstance(names, tuple) or not all(isinstance(n, str) and n.isidentifier() for n in names):
            raise UserError(f'{kind}: got {names!r}, expected a tuple of names, such as ("x",)')
    server, client = (*a.down, *a.derived, *a.private), (*a.slots, *a.client_state)
    for kinds, names in (
        ("down, derived and private", server),
        ("up and scalars", (*a.up, *a.scalars)),
        ("slots and client_state", client),
    ):
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise UserError(f"{twice[0]} is declared twice in {kinds}: leave one of them")
    if "x" not in a.down:
        raise UserError(f'down: got {a.down!r}, expected x among them, such as ("x",)')
    if "decays" in server:
        raise UserError("down, derived and private: decays is one that all methods have: rename it")
    taken = [name for name in client if name in PER_CLIENT]
    if taken:
        raise UserError(f"slots and client_state: {taken[0]} is one that all clients have: leave it out or rename it")
    other = [name for name in a.uniform if name not in (*a.up, *a.scalars)]
    if other:
        raise UserError(f"uniform: {other[0]} is neither in up nor in scalars")
    for name, of in a.change_of.items():
        if name not in a.up or of not in (*a.down, *a.derived):
            raise UserError(
                f"change_of: got {name} as a change of {of}, expected one of up, and one of down or derived"
            )
    if a.gradients not in (1, 2):
        raise UserError(f"gradients: got {a.gradients!r}, expected 1 or 2")


def check_names(a: Algorithm) -> list[str]:
    """Raise ``UserError`` for what looks like a hook or a declaration and is none; notes on names that nothing uses."""
    asked_for, used = _interface(type(a)), _used(type(a))
    defined = {name: value for cls in reversed(own_classes(type(a))) for name, value in vars(cls).items()}
    defined = {name: v for name, v in defined.items() if _public(name, asked_for) and not isinstance(v, Setting)}
    in_objects = [name for name in vars(a) if _public(name, asked_for) and name not in a.hypers]
    for name in (*defined, *in_objects):
        meant = "" if name in used else _meant(name, asked_for)
        if meant:
            raise UserError(
                f"{name} is none of a method's hooks and declarations (did you mean {meant!r}?): rename it, with _ in "
                "front if it is your own"
            )
    notes = []
    for name, value in defined.items():
        if isinstance(value, (int, float)) and name.islower():
            kind = type(value).__name__
            notes.append(
                f"{name} = {value} is a constant: {name}: {kind} = hyper({value}, ...) makes it a setting of "
                f"{type(a).__name__}"
            )
        elif name not in used:
            notes.append(f"nothing calls {type(a).__name__}.{name}: it is none of a method's hooks and declarations")
    return notes


def check_sent(a: Algorithm, sent: Any) -> None:
    """Raise ``UserError`` unless ``finish`` returns what is declared, by these names."""
    declared = (*a.up, *a.scalars)
    if not isinstance(sent, dict):
        raise UserError(f"finish returns {type(sent).__name__}, expected a dict with {', '.join(declared)}")
    got = ", ".join(map(str, sent)) or "nothing"
    for name in declared:
        if name not in sent:
            raise UserError(f"finish returns {got}, expected a dict with {name}, which is declared in up or scalars")
    for name in sent:
        if name not in declared:
            raise UserError(
                f"finish returns {shortened(name)}, expected {', '.join(declared)}: declare it in up or scalars, or "
                "leave it out"
            )


def may_draw(cls: type[Algorithm]) -> bool:
    """Whether the code of a user's method names one of torch's random operations."""
    return not RANDOM.isdisjoint(_used(cls))


def own_classes(cls: type) -> list[type]:
    """The classes that are the user's, mixins too."""
    return [each for each in cls.__mro__ if each is not object and not _is_built_in(each)]


def _interface(cls: type) -> set[str]:
    """What a round asks a method for, and what built-in methods ask those that inherit from them."""
    built_in = filter(_is_built_in, cls.__mro__)
    return {name for each in built_in for name in (*vars(each), *vars(each).get("__annotations__", {}))} | {
        *("config", "tensors", "eta_g", "decay", "moves_point")
    }


def _is_built_in(cls: type) -> bool:
    return cls.__module__.startswith("fedlada_mpi.")


def _public(name: str, asked_for: set[str]) -> bool:
    return not name.startswith("_") and name not in asked_for


def _meant(name: str, asked_for: set[str]) -> str:
    """The name of the interface that is close to ``name``; "" if there is none."""
    plain = {known.lower().replace("_", ""): known for known in sorted(asked_for) if not known.startswith("_")}
    match = get_close_matches(name.lower().replace("_", ""), plain, n=1, cutoff=CLOSE)
    return plain[match[0]] if match else ""


def _used(cls: type) -> set[str]:
    """The names that the functions of a user's classes read, and those of its module that they call."""
    seen: dict[CodeType, dict[str, Any]] = {}

    def visit(function: Any) -> None:
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            return
        seen[function.__code__] = function.__globals__
        for cell in function.__closure__ or ():
            visit(_contents(cell))
        for name in function.__code__.co_names:
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and called.__module__ == function.__module__:
                visit(called)

    for each in own_classes(cls):
        for value in vars(each).values():
            for function in _functions(value):
                visit(function)
    return {name for code in seen for name in _read(code)}


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _functions(value: Any) -> Iterator[Any]:
    """What is behind a method, a property and the like."""
    if isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, (cached_property, partial)):
        yield value.func
    elif isinstance(value, FunctionType):
        yield value
        yield inspect.unwrap(value)


def _read(code: CodeType) -> Iterator[str]:
    """Names of attributes and globals, and strings, as ``getattr`` takes them; a function's own name does not count."""
    for instruction in dis.get_instructions(code):
        of_interest = instruction.opname.startswith("LOAD") and not instruction.opname.startswith(LOCAL)
        if of_interest and isinstance(instruction.argval, str) and instruction.argval != code.co_name:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read(constant)
