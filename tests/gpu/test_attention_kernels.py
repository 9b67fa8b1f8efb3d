"""The attention kernels against torch's formula; on a GPU, or in Triton's interpreter by ``test_kernels.py``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import CUDA, DEVICE, agree, kernels_run, random

from fedlada_mpi.gpu.attention_kernels import attention, takes_attention
from fedlada_mpi.models import pieces

pytestmark = kernels_run
TYPES = (torch.float32, torch.bfloat16 if CUDA else torch.float16)  # the interpreter has no products of bfloat16
HEADS = 3 if CUDA else 1
SHAPES = [(6, 6, 4), (70, 70, 8), (17, 70, 24)]  # queries, keys, width
CASES = [(shape, causal, TYPES[0]) for shape in SHAPES for causal in (True, False)]
CASES += [(shape, causal, TYPES[1]) for shape in SHAPES for causal in (True, False)] if CUDA else []
CASES += [] if CUDA else [(SHAPES[1], False, TYPES[1]), (SHAPES[2], True, TYPES[1])]  # seconds each


def expected(q, k, v, dout, causal, scale):
    """Output and gradients in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return [out, *torch.autograd.grad(out, (q, k, v), dout.double())]


@pytest.mark.parametrize(("shape", "causal", "dtype"), CASES)
def test_output_and_gradients(shape, causal, dtype):
    torch.manual_seed(0)
    queries, keys, width = shape
    q = random(2, HEADS, queries, width, dtype=dtype).requires_grad_()
    k, v = (random(2, HEADS, keys, width, dtype=dtype).requires_grad_() for _ in range(2))
    dout = random(2, HEADS, queries, width, dtype=dtype)
    out = attention(q, k, v, causal, 0.3)
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    for mine, right in zip(found, expected(q, k, v, dout, causal, 0.3), strict=True):
        agree(mine, right, dtype)


@pytest.mark.parametrize("join", ["chunk", "unbind"])
def test_pieces_of_one_product_have_their_gradient_without_a_copy(join):
    torch.manual_seed(0)
    packed = random(2, 5, 3 * 32).requires_grad_()
    if join == "chunk":
        cut = [x.unflatten(-1, (2, 16)).transpose(1, 2) for x in pieces.chunk(packed, 3, -1)]
    else:
        cut = pieces.unbind(packed.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).contiguous(), 0)
    seen = []
    for x in cut:
        x.register_hook(seen.append)
    out = attention(*cut, False, 0.25)
    dout = random(2, 2, 5, 16)
    (gradient,) = torch.autograd.grad(out, packed, dout)
    assert len({grad.untyped_storage().data_ptr() for grad in seen}) == 1
    q, k, v = expected(*cut, dout, False, 0.25)[1:]
    right = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    agree(gradient, torch.cat(right, -1), torch.float32)


def test_pieces_that_lie_apart_are_joined():
    whole = torch.randn(2, 6, requires_grad=True)
    a, b, c = pieces.split(whole, [1, 2, 3], 1)
    (2 * a.sum() + (b * b).sum()).backward()
    right = torch.cat((torch.full((2, 1), 2.0), 2 * b.detach(), torch.zeros(2, 3)), 1)
    assert torch.equal(whole.grad, right)
    assert c.grad_fn is not None


def test_what_the_kernels_take():
    x = torch.zeros(1, 1, 2, 8, device=DEVICE)
    assert takes_attention(x, x, x)
    wide = torch.zeros(1, 1, 2, 256, device=DEVICE)
    assert not takes_attention(wide, wide, wide)
    assert not takes_attention(x.double(), x.double(), x.double())
    assert not takes_attention(x[0], x[0], x[0])
