"""Comparison of Triton kernels with plain code: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedlada_mpi.gpu import layer_kernels
from fedlada_mpi.gpu.triton_support import triton

CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if CUDA else "cpu"

kernels_run = pytest.mark.skipif(not layer_kernels.available(), reason="neither a CUDA device nor Triton's interpreter")


def prepare_language_once() -> None:
    """Triton's interpreter exchanges all operations of the language at every call of a function by a kernel, though
    the launch has done so: most of its time. Here once for each module of such functions."""
    prepared = set[str]()

    def call(function: Any, *arguments: Any, **options: Any) -> Any:
        if function.fn.__module__ not in prepared:
            prepared.add(function.fn.__module__)
            triton.runtime.interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    triton.runtime.interpreter.InterpretedFunction.__call__ = call


def spare_checks_without_effect() -> None:
    """Triton's interpreter computes every integer operation in 64 bits, too, for an assertion that it then leaves out,
    and makes the same table of types at every operation: together a third of its time."""
    interpreter = triton.runtime.interpreter
    assert not interpreter.InterpreterOptions.debug
    interpreter.interpreter_builder.options = replace(interpreter.InterpreterOptions(), sanitize_overflow=False)
    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = np_dtype


if os.environ.get("TRITON_INTERPRET") == "1" and triton is not None:
    prepare_language_once()
    spare_checks_without_effect()


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """What a kernel does not write is NaN, and 255 in bytes."""

    def poisoned(make):
        def allocate(*arguments, **options):
            memory = make(*arguments, **options)
            return memory.fill_(
                float("nan") if memory.is_floating_point() else 255 if memory.dtype == torch.uint8 else 0
            )

        return allocate

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def random(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def agree(found: torch.Tensor, expected: torch.Tensor, dtype=None) -> None:
    dtype = dtype or expected.dtype
    assert found.dtype == dtype
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error < {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3}[dtype], (
        f"relative error {error:.2e}"
    )
