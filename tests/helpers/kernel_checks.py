"""Comparison of Triton kernels with plain code: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

from fedlada_mpi.gpu import layer_kernels

CUDA = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if CUDA else "cpu"

kernels_run = pytest.mark.skipif(not layer_kernels.available(), reason="neither a CUDA device nor Triton's interpreter")


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
