"""SHA-256 on the GPU against ``hashlib``, on a CUDA device or in the interpreter."""

from __future__ import annotations

import hashlib

import pytest
import torch
from kernel_checks import CUDA, DEVICE, kernels_run

from fedlada_mpi.gpu.digest_kernels import LANES, leaf_digests
from fedlada_mpi.privacy.masks import received_digest

LEAF = 128  # bytes


def expected(vector: torch.Tensor) -> list[bytes]:
    content = vector.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    whole = len(content) // LEAF * LEAF
    return [hashlib.sha256(content[i : i + LEAF]).digest() for i in range(0, whole, LEAF)]


def found(vector: torch.Tensor) -> list[bytes]:
    return [bytes(row) for row in leaf_digests(vector, LEAF).cpu().numpy()]


@kernels_run
def test_every_leaf():
    """More than one program has, and a rest."""
    vector = torch.randint(0, 256, ((LANES + 3) * LEAF + 16,), dtype=torch.uint8).to(DEVICE)
    assert found(vector) == expected(vector)


@kernels_run
def test_floats_and_words_with_all_bits():
    """Signs and carries: all ones, all zeros."""
    rows = [torch.full((LEAF // 4,), value, dtype=torch.int32) for value in (-1, 0, 1 << 30, -(2**31))]
    vector = torch.cat([*rows, torch.randn(LEAF // 4).view(torch.int32)]).view(torch.float32).to(DEVICE)
    assert found(vector) == expected(vector)


@kernels_run
def test_less_than_a_leaf():
    assert found(torch.zeros(LEAF - 1, dtype=torch.uint8, device=DEVICE)) == []


@pytest.mark.skipif(not CUDA, reason="takes a GPU")
def test_a_whole_network():
    """As a silo takes it: the digest of a vector does not depend on where it is."""
    vector = torch.randn(11_173_962)
    assert received_digest([vector.cuda()]) == received_digest([vector])


@pytest.mark.parametrize(("vector", "size"), [(torch.zeros(4096)[::2], 128), (torch.zeros(4096), 100)])
def test_what_has_no_whole_blocks_is_refused(vector, size):
    with pytest.raises(ValueError, match="expected a contiguous vector and a multiple of 64"):
        leaf_digests(vector, size)
