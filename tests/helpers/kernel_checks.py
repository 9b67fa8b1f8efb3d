"""Comparison of Triton kernels with plain code: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

from fedlada_mpi.gpu import layer_kernels

CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if CUDA else "cpu"

kernels_run = pytest.mark.skipif(not layer_kernels.available(), reason="neither a CUDA device nor Triton's interpreter")


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
