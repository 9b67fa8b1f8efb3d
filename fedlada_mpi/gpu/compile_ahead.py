"""Kernels of a piece of work compiled at once, in threads, rather than one after another as each is first launched.

A run in which our kernels are noted and not launched finds out which there are: its numbers mean nothing, but shapes,
types and alignments are those of every later run. Triton's passes release Python's global lock and its assembler is a
program of its own, so threads keep all cores busy. What fails here is compiled, or fails, where it is launched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..support.dispatch import DispatchMode
from ..support.processes import usable_cores
from .triton_support import triton

OURS = __name__.partition(".")[0]
ALLOCATING = {getattr(torch.ops.aten, f"{new}empty{how}") for new in ("", "new_") for how in ("", "_strided")}
ALLOCATING.add(torch.ops.aten.empty_like)

Submit = Callable[..., object]


def compile_ahead(work: Callable[[], object]) -> None:
    """Compile and load the kernels that ``work`` launches; it runs without them, so what it computes is of no use."""
    function = getattr(triton, "JITFunction", None)
    if function is None:
        return
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    compiled: dict[Any, list[Any]] = defaultdict(list)

    def threads() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(usable_cores(), "compile", _use, (device,))

    with threads() as pool, suppress(Exception), _noting(function, pool.submit, compiled), _ZeroedMemory():
        work()
    # All forms of a kernel after one another: most have the same launching function, which a C compiler makes.
    with threads() as pool:
        list(pool.map(_load, compiled.values()))


class _ZeroedMemory(DispatchMode):
    """What kernels would have written is zero: other operations might refuse, or index with, whatever was there."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function.overloadpacket in ALLOCATING else result


@contextmanager
def _noting(function: Any, submit: Submit, compiled: dict[Any, list[Any]]) -> Iterator[None]:
    """Launches of our kernels submit what fills ``compiled``; others go on, as only ours are known to be safe."""
    run, met = function.run, set[Hashable]()

    def noted(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not kernel.module.startswith(OURS):
            return run(kernel, *arguments, grid=grid, warmup=warmup, **options)
        key = (kernel, *_specialisation(kernel, arguments), *sorted(options.items()))
        if key not in met:
            met.add(key)
            given = [_Address.of(argument) for argument in arguments]
            submit(_compile, compiled[kernel], run, kernel, given, grid, options)
        return None

    function.run = noted
    try:
        yield
    finally:
        function.run = run


class _Address:
    """What Triton specialises on in a tensor: its type and alignment; its memory is not held until then."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype, self.address = tensor.dtype, tensor.data_ptr() % 16

    @classmethod
    def of(cls, argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(cls.of(one) for one in argument)
        return cls(argument) if isinstance(argument, torch.Tensor) else argument

    def data_ptr(self) -> int:
        return self.address


def _use(device: int | None) -> None:
    """Every thread has a current device of its own."""
    if device is not None:
        torch.cuda.set_device(device)


def _compile(
    forms: list[Any], run: Callable[..., Any], kernel: Any, arguments: list[Any], grid: Any, options: dict[str, Any]
) -> None:
    with suppress(Exception):
        forms.append(run(kernel, *arguments, grid=grid, warmup=True, **options))


def _load(forms: list[Any]) -> None:
    with suppress(Exception):
        for form in forms:
            _ = form.run  # this loads it, and builds the function that launches it


def _specialisation(kernel: Any, arguments: tuple[Any, ...]) -> Iterator[Hashable]:
    """What of the arguments decides which of a kernel's compiled forms is launched."""
    for parameter, value in zip(kernel.params, arguments, strict=True):
        yield value if parameter.is_constexpr else _kind(value, parameter.do_not_specialize)


def _kind(value: Any, any_number: bool) -> Hashable:
    """What a compiled form depends on in an argument that is no constant; a tuple's is that of each of its members."""
    if isinstance(value, tuple):
        return tuple(_kind(one, any_number) for one in value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        wide = value.bit_length() > 31
        return wide if any_number else (wide, value == 1, value % 16 == 0)
    return type(value).__name__
