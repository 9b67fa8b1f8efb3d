"""Every Triton kernel against its plain specification, on fresh random numbers into poisoned memory.

On a CUDA device directly; elsewhere in Triton's interpreter, which must be chosen before Triton is imported,
so ``test_in_the_interpreter`` runs the rest of this file, and others like it, in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from inspect import getsource
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import CUDA, DEVICE, agree, kernels_run, poison, random  # noqa: F401
from limits import LIMIT
from repository import ROOT
from torch import nn

from fedlada_mpi import models
from fedlada_mpi.doctor import machine
from fedlada_mpi.gpu import layer_kernels, norm_kernels, norm_sum_kernels, triton_support
from fedlada_mpi.gpu.limits import TooManyElements
from fedlada_mpi.gpu.side_stream import SideStream
from fedlada_mpi.gpu.triton_support import triton
from fedlada_mpi.models import columns, layer_steps, layers
from fedlada_mpi.models.columns import Window, pair
from fedlada_mpi.models.layout import Layout
from fedlada_mpi.models.stack import Stack
from fedlada_mpi.rounds.gradients import StackedEngine
from fedlada_mpi.support.randomness import Draws
from fedlada_mpi.support.user_code import Given
from fedlada_mpi.tasks.client_loss import CROSS_ENTROPY

TYPES = (torch.float32, torch.bfloat16)
KERNELS = [
    import_module(f"fedlada_mpi.gpu.{file.stem}") for file in Path(machine.__file__).parents[1].glob("gpu/*_kernels.py")
]
IN_THE_INTERPRETER = (  # by processes, each of which takes seconds to start
    ("test_kernels.py", "test_product_kernels.py"),
    ("test_sequence_kernels.py", "test_attention_kernels.py", "test_language_kernels.py", "test_fuse.py"),
    ("test_chacha.py", "test_digests.py", "test_private_rounds.py"),
)
PARTLY_FOR_A_GPU = IN_THE_INTERPRETER[-1]


def flat_views(count: int, channels: int, *, dtype=torch.float32) -> list[torch.Tensor]:
    """Two parameters [count, channels] inside flat vectors [count, longer], as in a layout."""
    flat = random(count, 3 * channels + 17, dtype=dtype)
    return [flat[:, 5 : 5 + channels], flat[:, 9 + channels : 9 + 2 * channels]]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To the bit; but the interpreter cuts a bfloat16 off where the hardware rounds it, at most one step further."""
    assert found.dtype == expected.dtype
    if CUDA or expected.dtype == torch.float32:
        assert torch.equal(found, expected)
    else:
        rounded_away = expected.view(torch.int16).int() - found.view(torch.int16).int()
        assert ((rounded_away == 0) | (rounded_away == 1)).all()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(triton is None or layer_kernels.available(), reason="runs directly, or has no Triton")
@pytest.mark.parametrize("names", IN_THE_INTERPRETER, ids=lambda names: names[0])
def test_in_the_interpreter(names):
    others = "not test_in_the_interpreter and not test_every_kernel_compiles_for_a_gpu and not test_without_triton"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", others]
    command += [str(Path(__file__).with_name(name)) for name in names]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert ("skipped" in done.stdout) == (names is PARTLY_FOR_A_GPU), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(triton is None or layer_kernels.available(), reason="runs directly, or has no Triton")
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """The interpreter takes what the compiler may refuse; this takes the compiler's word where there is no GPU."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/helpers", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["DISABLE_PTXAS_OPT"] = "1"  # asked for its verdict, not for fast code
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-4000:]
    made = {"squares", "update", "steps"}  # by fuse.py
    for module in KERNELS:
        text = getsource(module)
        made |= {name for name in re.findall(r"^def (_\w+)", text, re.MULTILINE) if f"{name}[" in text}
    assert set(done.stdout.split()) == made


def test_without_triton():
    """The modules import where Triton is missing, and report that no kernel runs there."""
    code = (
        "import sys; sys.modules['triton'] = None; from fedlada_mpi.gpu import layer_kernels as k; print(k.available())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.strip() == "False", done.stderr


PIECES = (7, 7, 20)  # as a group too large for one tile, its last piece partly outside

# (rows, columns, channels), kernel, stride, padding: the shapes of the networks, small, and some odd ones.
GEOMETRIES = [
    ((4, 4, 64), 3, 1, 1),
    ((4, 6, 32), 3, 2, 1),
    ((4, 4, 16), 1, 2, 0),
    ((4, 4, 16), 1, 1, 0),
    ((2, 2, 128), 3, 2, 1),
    ((1, 1, 64), 3, 1, 1),
    ((8, 6, 3), 7, 2, 3),
    ((6, 7, 3), 5, 1, 0),
    ((6, 6, 1), 3, 1, 1),
    ((6, 5, 24), 3, 2, 1),
    ((5, 5, 48), 2, 3, 0),
]


@kernels_run
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "channels"), [(1, 10), (33, 96), (7, 300)])
def test_spread(rows, channels, dtype):
    bias = flat_views(2, channels, dtype=dtype)[0]
    assert torch.equal(layer_kernels.spread(bias, rows), bias.unsqueeze(1).expand(-1, rows, -1))


@kernels_run
@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding", "dtype"),
    [(*geometry, torch.float32) for geometry in GEOMETRIES]
    + [(*geometry, torch.bfloat16) for geometry in GEOMETRIES[:2]],
)
def test_columns(shape, kernel, stride, padding, dtype):
    window = Window(*shape[:2], *(pair(v) for v in (kernel, stride, padding)))
    (r0, r1), (c0, c1) = window.taps
    used = (r1 - r0) * (c1 - c0) * shape[2]
    width = -(-used // 16) * 16
    x = random(2, 3, *shape, dtype=dtype)
    assert torch.equal(layer_kernels.im2col(x, window, width), columns.im2col(x, window, width))
    cols = random(2, 3 * prod(window.out), width, dtype=dtype)
    expected = columns.col2im(cols.double(), window, x.shape)
    agree(layer_kernels.col2im(cols, window, x.shape), expected, dtype)


@kernels_run
@pytest.mark.parametrize(
    ("shape", "groups", "n", "activation", "with_residual", "dtype"),
    [
        ((16, 16, 16), 2, 2, "relu", False, torch.float32),
        ((4, 4, 32), 2, 9, "relu", True, torch.float32),
        ((4, 4, 32), 2, 9, "relu", True, torch.bfloat16),
        ((4, 4, 32), 2, 9, "relu6", True, torch.float32),
        ((4, 4, 32), 2, 9, "relu6", False, torch.bfloat16),
        ((2, 2, 128), 2, 9, "", False, torch.float32),
        ((1, 1, 64), 2, 66, "", True, torch.float32),
        ((3, 5, 24), 2, 17, "relu", True, torch.bfloat16),
        ((4, 5, 96), 8, 3, "relu6", True, torch.bfloat16),  # programs of four groups, of two, and of all
        ((4, 4, 72), 4, 3, "", True, torch.float32),
        ((4, 4, 24), 8, 9, "relu", False, torch.bfloat16),
        ((4, 4, 8), 8, 3, "relu", True, torch.float32),  # channels by themselves
        (PIECES, 2, 2, "relu", True, torch.float32),
        *([(PIECES, 2, 2, "relu6", True, torch.float32)] if CUDA else []),
        (PIECES, 2, 2, "", False, torch.bfloat16),
    ],
)
def test_group_norm(shape, groups, n, activation, with_residual, dtype, monkeypatch):
    count = 2
    monkeypatch.setattr("fedlada_mpi.gpu.norm_sum_kernels.SUMMANDS", 2)
    if shape == PIECES:
        monkeypatch.setattr("fedlada_mpi.gpu.norm_kernels.IN_REGISTERS", 512)
        monkeypatch.setattr("fedlada_mpi.gpu.norm_kernels.TOGETHER", 512)
    x = 3 + 2 * random(count, n, *shape, dtype=dtype)
    residual = 4 * random(*x.shape, dtype=dtype) if with_residual else None
    gamma, beta = flat_views(count, shape[2], dtype=dtype)
    out, mean, rstd = layer_kernels.group_norm(x, gamma, beta, groups, residual, activation)
    wide = [None if t is None else t.double() for t in (x, gamma, beta, residual)]
    exact = layer_steps.group_norm(*wide[:3], groups, wide[3], activation)
    agree(out, exact[0], dtype)
    agree(mean, exact[1], torch.float32)
    agree(rstd, exact[2], torch.float32)

    dout = random(*x.shape, dtype=dtype)
    grads, expected_grads = flat_views(count, shape[2], dtype=dtype), flat_views(count, shape[2], dtype=torch.float64)
    before = grads[0]._base.clone()
    mask = out if activation else None
    side_stream = SideStream(x.device)
    dx, dresidual = layer_kernels.group_norm_backward(
        dout, x, gamma, mean, rstd, mask, groups, activation, with_residual, *grads, side_stream
    )
    expected = layer_steps.group_norm_backward(
        dout.double(),
        *wide[:2],
        exact[1],
        exact[2],
        mask,
        groups,
        activation,
        with_residual,
        *expected_grads,
        side_stream,
    )
    side_stream.join()
    agree(dx, expected[0], dtype)
    for found, right in zip(grads, expected_grads, strict=True):
        agree(found, right, dtype)
        found.zero_()
    for view, copy in zip(around(before, shape[2]), around(grads[0]._base, shape[2]), strict=True):
        assert torch.equal(view, copy)  # nothing but the two parameters was touched
    assert (dresidual is None) == (not with_residual)
    if with_residual:
        kept = {"": lambda out: 1, "relu": lambda out: out > 0, "relu6": lambda out: (out > 0) & (out < 6)}[activation]
        assert torch.equal(dresidual, dout * kept(out))
    if shape != PIECES:
        half = (dout / 2, dout / 2)  # of a result that two layers used; exact in any type
        again, more = layer_kernels.group_norm_backward(
            half[0], x, gamma, mean, rstd, mask, groups, activation, with_residual, *grads, side_stream, half[1]
        )
        side_stream.join()
        agree(again, dx, dtype)
        assert dresidual is None or torch.equal(more, dresidual)


@kernels_run
@pytest.mark.parametrize(
    ("shape", "kernel", "n", "activation", "used", "with_residual", "dtype"),
    [
        ((4, 4, 32), 3, 9, "relu", "twice", True, torch.float32),
        ((4, 4, 32), 3, 9, "relu", "once", False, torch.bfloat16),
        ((3, 5, 48), (3, 1), 5, "", "twice", True, torch.bfloat16),
        ((2, 2, 16), 5, 3, "relu6", "once", True, torch.float32),  # some taps of the kernel meet no data
    ],
)
def test_a_norm_and_the_columns_behind_it(shape, kernel, n, activation, used, with_residual, dtype):
    count, (rows, width, channels), (height, length) = 2, shape, pair(kernel)
    window = Window(rows, width, (height, length), (1, 1), (height // 2, length // 2))
    x, gamma, beta = 3 + 2 * random(count, n, *shape, dtype=dtype), *flat_views(count, channels, dtype=dtype)
    residual = random(*x.shape, dtype=dtype) if with_residual else None
    (r0, r1), (c0, c1) = window.taps
    assert layer_kernels.makes_columns(x, 2, window, (r1 - r0) * (c1 - c0) * channels)
    out, cols, mean, rstd = layer_kernels.norm_columns(x, gamma, beta, 2, residual, activation, 1e-5, window)
    agree(out, layer_kernels.group_norm(x, gamma, beta, 2, residual, activation)[0], dtype)
    assert torch.equal(cols, columns.im2col(out, window, cols.shape[-1]))

    dout, dcols = random(*x.shape, dtype=dtype) if used == "twice" else None, random(*cols.shape, dtype=dtype)
    total = columns.col2im(dcols.double(), window, x.shape) + (0 if dout is None else dout.double())
    mask, side_stream = out if activation else None, SideStream(x.device)
    grads, exact_grads = flat_views(count, channels, dtype=dtype), flat_views(count, channels, dtype=torch.float64)
    about = (2, activation, with_residual)
    dx, dresidual = layer_kernels.norm_columns_backward(
        dout, dcols, window, x, gamma, mean, rstd, mask, *about, *grads, side_stream
    )
    exact, exact_residual = layer_steps.group_norm_backward(
        total, x.double(), gamma.double(), mean.double(), rstd.double(), mask, *about, *exact_grads, side_stream
    )
    side_stream.join()
    for found, right in zip((dx, *grads), (exact, *exact_grads), strict=True):
        agree(found, right, dtype)
    assert (dresidual is None) == (not with_residual)
    if with_residual:
        agree(dresidual, exact_residual, dtype)


@pytest.mark.parametrize(
    ("shape", "groups", "window", "width", "why"),
    [
        ((4, 4, 32), 16, Window(4, 4, (3, 3), (1, 1), (1, 1)), 288, "two channels a group"),
        ((4, 4, 20), 2, Window(4, 4, (3, 3), (1, 1), (1, 1)), 192, "padded columns"),
        ((9, 9, 16), 2, Window(9, 9, (7, 7), (1, 1), (3, 3)), 784, "49 taps"),
        ((32, 32, 64), 2, Window(32, 32, (3, 3), (1, 1), (1, 1)), 576, "a group too large for registers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_columns_that_a_norm_leaves_to_im2col(shape, groups, window, width, why):
    assert not layer_kernels.makes_columns(torch.empty(1, 1, *shape), groups, window, width), why


class Residual(nn.Module):
    """Norms before a convolution alone, before one and a residual, and before two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1, bias=i == 1) for i in range(4)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(2, 16) for _ in range(3))
        self.side, self.head = nn.Conv2d(16, 16, 3, 2, 1), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norms[0](self.convolutions[0](x)))
        y = F.relu(self.norms[1](self.convolutions[1](x)))
        y = F.relu(self.norms[2](self.convolutions[2](y)) + x)
        return self.head(self.convolutions[3](y).mean((2, 3)) + self.side(y).mean((2, 3)))


@kernels_run
def test_norms_give_columns_to_convolutions(monkeypatch):
    """In a traced network: three norms of it, with the gradients of plain code."""
    network = models.build(Given(Residual()), 3, (4, 4, 3))
    values, inputs = network.initial().expand(2, -1).contiguous().to(DEVICE), random(2, 5, 4, 4, 3)
    targets, keys = torch.arange(10, device=DEVICE).view(2, 5) % 3, torch.arange(2, device=DEVICE)
    weight, launched, gradients = torch.full((2, 5), 0.2, device=DEVICE), [], []

    def noted(*given):
        launched.append(given[-1])
        return norm_kernels.norm_columns(*given)

    monkeypatch.setattr(layer_kernels, "norm_columns", noted)
    monkeypatch.setattr(layers, "use_library", lambda x, window, groups=1: False)  # as on a GPU
    for kernels in (None, layer_kernels):
        gradients.append(torch.zeros_like(values))
        StackedEngine(network, kernels, DEVICE).gradients(values, gradients[-1], inputs, targets, weight, keys)
    assert [window.kernel for window in launched] == [(3, 3)] * 3
    for name, grad in network.layout.views(gradients[0]).items():
        assert (network.layout.views(gradients[1])[name] - grad).norm() < 1e-5 * grad.norm(), name


@kernels_run
@pytest.mark.parametrize(
    ("n", "channels", "dtype"),
    [(70, 192, torch.float32), (70, 192, torch.bfloat16), (7, 24, torch.float32), (18, 1000, torch.float32)],
)
def test_layer_norm_over_many_rows(n, channels, dtype):
    """More rows than a program takes, and not a multiple of them."""
    x, dout = 3 + 2 * random(2, n, 1, 1, channels, dtype=dtype), random(2, n, 1, 1, channels, dtype=dtype)
    gamma, beta = flat_views(2, channels, dtype=dtype)
    _, mean, rstd = layer_kernels.group_norm(x, gamma, beta, 1, None, "")
    grads, side_stream = flat_views(2, channels, dtype=dtype), SideStream(x.device)
    again = [grad.clone() for grad in grads]
    dx, _ = layer_kernels.group_norm_backward(dout, x, gamma, mean, rstd, None, 1, "", False, *grads, side_stream)
    if CUDA:
        layer_kernels.group_norm_backward(dout, x, gamma, mean, rstd, None, 1, "", False, *again, side_stream)
    side_stream.join()
    wide = [value.double().requires_grad_() for value in (x, gamma, beta)]
    normal = F.layer_norm(wide[0], (channels,))
    (normal * wide[1].view(2, 1, 1, 1, -1) + wide[2].view(2, 1, 1, 1, -1)).backward(dout.double())
    for found, repeated, exact in zip((dx, *grads), (dx, *again), wide, strict=True):
        agree(found, exact.grad, dtype)
        assert not CUDA or torch.equal(found, repeated)


@kernels_run
@pytest.mark.parametrize(
    ("length", "width", "dtype"), [(700, 40, torch.float32), (20, 96, torch.bfloat16), (600, 3, torch.float32)]
)
def test_column_sums(length, width, dtype):
    rows, around = random(3, length, width, dtype=dtype), torch.full((3, width + 9), 5.0, device=DEVICE, dtype=dtype)
    layer_kernels.column_sums(around[:, 4 : 4 + width], rows)
    agree(around[:, 4 : 4 + width], rows.double().sum(1), dtype)
    assert (around[:, :4] == 5).all()
    assert (around[:, 4 + width :] == 5).all()


@kernels_run
@pytest.mark.parametrize(("n", "classes", "dtype"), [(5, 10, torch.float32), (70, 200, torch.bfloat16)])
def test_cross_entropy(n, classes, dtype):
    logits, labels = 5 * random(3, n, classes, dtype=dtype), torch.arange(3 * n, device=DEVICE).view(3, n) % classes
    weight = torch.full((3, n), 1 / n, device=DEVICE)
    weight[1, 2:] = 0  # padding
    losses, dlogits = layer_kernels.cross_entropy(logits, labels, weight)
    wide = logits.double().requires_grad_()
    exact = CROSS_ENTROPY(wide, labels, weight.double())
    exact.sum().backward()
    agree(losses, exact.detach(), torch.float32)
    agree(dlogits, wide.grad, dtype)


@kernels_run
@pytest.mark.parametrize("name", ["relu", "relu6", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_and_activation(name, dtype):
    # More rows than a program takes, and not a multiple of them.
    x, dout = 3 * random(2, 150, 24, dtype=dtype), random(2, 150, 24, dtype=dtype)
    bias = random(2, 50, dtype=dtype)[:, 9:33]
    out = layer_kernels.bias_activation(x, bias, name)
    dx, sums = layer_kernels.bias_activation_backward(dout, x, bias, name)
    wide = x.double().requires_grad_()
    exact = layers.ACTIVATIONS[name](wide + bias.double().unsqueeze(1))
    exact.backward(dout.double())
    agree(out, exact.detach(), dtype)
    agree(dx, wide.grad, dtype)
    agree(sums.sum(1), wide.grad.sum(1), torch.float32)


@kernels_run
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout(p, dtype):
    """Which elements are kept is the same to the bit, of every operation of a step."""
    x, keys = random(3, 7, 190, dtype=dtype), torch.tensor([5, -(1 << 62), (1 << 63) - 1], device=DEVICE)
    x[1, 2, 3] = float("inf")
    plain, fused = Draws(keys, stacked=True), Draws(keys, stacked=True, dropout=layer_kernels.dropout)
    for _ in range(2):
        expected, found = (draws._dropout(x, p, True) for draws in (plain, fused))
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[0].isfinite(), expected[0].isfinite())
        agree(found[0].nan_to_num(0, 0, 0), expected[0].nan_to_num(0, 0, 0), dtype)
    assert 0.8 * (1 - p) < found[1].double().mean() < 1.2 * (1 - p)


@kernels_run
def test_factors_of_channels():
    x, factor = random(2, 3, 4, 5, 24), random(2, 60)[:, 7:31]
    agree(layer_kernels.scale(x, factor), layer_steps.scale_channels(x.double(), factor.double()), torch.float32)
    sums = torch.zeros(2, 24, device=DEVICE)
    layer_kernels.column_sums(sums, x.flatten(1, -2), x.flip(1).flatten(1, -2))
    agree(sums, (x.double() * x.flip(1).double()).sum((1, 2, 3)), torch.float32)


@kernels_run
def test_a_norm_with_one_frozen_parameter():
    gamma, beta = flat_views(2, 16)
    x, side_stream = random(2, 3, 2, 2, 16), SideStream(DEVICE)
    _, mean, rstd = layer_kernels.group_norm(x, gamma, beta, 2, None, "")
    grads = [torch.zeros(2, 16, device=DEVICE) for _ in range(4)]
    arguments = (x.flip(0), x, gamma, mean, rstd, None, 2, "", False)
    layer_kernels.group_norm_backward(*arguments, grads[0], grads[1], side_stream)
    layer_kernels.group_norm_backward(*arguments, grads[2], None, side_stream)
    layer_kernels.group_norm_backward(*arguments, None, grads[3], side_stream)
    layer_kernels.group_norm_backward(*arguments, None, None, side_stream)
    side_stream.join()
    assert grads[0].norm() > 0
    assert torch.equal(grads[2], grads[0])
    assert torch.equal(grads[3], grads[1])


@kernels_run
@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_several_norms_are_added_up_together(dtype, monkeypatch):
    """More of them than a launch takes, of different widths and numbers of summands; some have a frozen parameter."""
    monkeypatch.setattr("fedlada_mpi.gpu.norm_sum_kernels.SUMMANDS", 4)
    monkeypatch.setattr("fedlada_mpi.gpu.norm_sum_kernels.NORMS", 3)
    side_stream, sums = SideStream(DEVICE), []
    flat = random(2, 1000, dtype=dtype)
    before, at = flat.clone(), 1
    for blocks, channels, frozen in (
        (1, 16, ""),
        (9, 24, ""),
        (6, 48, "gamma"),
        (3, 32, ""),
        (5, 40, "beta"),
        (2, 5, ""),
    ):
        partial = random(2, blocks, 2, channels)
        grads = {name: flat[:, at + i * 50 : at + i * 50 + channels] for i, name in enumerate(("gamma", "beta"))}
        norm_sum_kernels.submit_sums(
            partial, *(None if name == frozen else grad for name, grad in grads.items()), side_stream
        )
        sums += [(at + i * 50, partial.sum(1)[:, i]) for i, name in enumerate(grads) if name != frozen]
        at += 101
    side_stream.join()
    for begin, expected in sums:
        agree(flat[:, begin : begin + expected.shape[1]], expected.double(), dtype)
        before[:, begin : begin + expected.shape[1]] = flat[:, begin : begin + expected.shape[1]]
    assert torch.equal(before, flat)  # nothing else was touched


@kernels_run
def test_a_norm_without_a_bias():
    """Whose shift is one for all clients, unlike its scale, which is a part of their vectors."""
    gamma, x = flat_views(3, 16)[0], random(3, 2, 2, 2, 16)
    beta = torch.zeros(1, 16, device=DEVICE).expand(3, 16)
    exact = layer_steps.group_norm(x.double(), gamma.double(), beta.double(), 2, None, "")
    agree(layer_kernels.group_norm(x, gamma, beta, 2, None, "")[0], exact[0], torch.float32)


@kernels_run
@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding", "dtype"),
    [
        *([((5, 5, 12), (7, 7), 1, 3, torch.float32)] if CUDA else []),
        ((3, 3, 12), (5, 5), 1, 2, torch.float32),
        ((5, 7, 16), (3, 3), 2, 1, torch.float32),
        ((4, 4, 96), (3, 1), 1, 0, torch.bfloat16),
        ((2, 2, 8), (5, 5), 2, 2, torch.float32),
        ((7, 7, 48), (3, 3), 1, 1, torch.bfloat16),
    ],
)
def test_depthwise(shape, kernel, stride, padding, dtype):
    window = Window(*shape[:2], kernel, pair(stride), pair(padding))
    taps, channels = prod(kernel), shape[2]
    x = random(2, 3, *shape, dtype=dtype)
    # Rows of a flat vector, as a layout stores them.
    flat = random(2, 80 * channels, dtype=dtype)
    weight, bias = flat[:, : 64 * channels].view(2, 64, channels), flat[:, 64 * channels : 65 * channels]
    out = layer_kernels.depthwise(x, weight, bias, window)
    dout = random(*out.shape, dtype=dtype)
    dx = layer_kernels.depthwise_input_gradient(dout, weight, window, x.shape)
    grad = torch.zeros(2, 64, channels, device=DEVICE, dtype=dtype)
    layer_kernels.depthwise_weight_gradient(grad, x, dout, window)
    for c in range(2):
        image = x[c].double().permute(0, 3, 1, 2).requires_grad_()
        taps_of = weight[c, :taps].double().T.reshape(channels, 1, *kernel).requires_grad_()
        exact = F.conv2d(image, taps_of, bias[c].double(), stride, padding, groups=channels)
        exact.backward(dout[c].double().permute(0, 3, 1, 2))
        agree(out[c], exact.detach().permute(0, 2, 3, 1), dtype)
        agree(dx[c], image.grad.permute(0, 2, 3, 1), dtype)
        agree(grad[c, :taps], taps_of.grad.reshape(channels, taps).T, dtype)
    assert not grad[:, taps:].any()


def around(flat: torch.Tensor, channels: int) -> list[torch.Tensor]:
    """What is around the two parameters of ``flat_views``."""
    return [flat[:, :5], flat[:, 5 + channels : 9 + channels], flat[:, 9 + 2 * channels :]]


@kernels_run
@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding", "dtype"),
    [
        ((6, 6, 64), 3, 2, 1, torch.float32),
        ((5, 7, 20), 3, 2, 1, torch.bfloat16),
        ((6, 6, 16), 2, None, 0, torch.float32),
        ((5, 5, 3), 3, 1, 1, torch.float32),
    ],
)
def test_max_pool(shape, kernel, stride, padding, dtype):
    # Few distinct values: ties in most windows.
    x = torch.randint(-2, 3, (2, 3, *shape)).to(DEVICE, dtype)
    x[0, 0, 0, 0, 0], x[1, 2, 2, 2] = float("nan"), float("-inf")
    copy = x.clone().requires_grad_()
    x.requires_grad_()
    out, expected = layer_kernels.max_pool(x, kernel, stride, padding), plain_max_pool(copy, kernel, stride, padding)
    assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
    weights = torch.randint(-8, 9, out.shape).to(out)
    out.backward(weights)
    expected.backward(weights)
    assert torch.equal(x.grad, copy.grad)


@kernels_run
def test_the_doctors_trial():
    assert machine.pooled(DEVICE) == 3


def plain_max_pool(x, kernel, stride, padding):
    pooled = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), kernel, stride, padding)
    return pooled.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])


def plain_gather(images, index, flip, dy, dx, mean, std, dtype):
    _, rows, columns, _ = images.shape
    h = torch.arange(rows, device=index.device)[:, None] + dy[..., None, None].long()
    w = torch.arange(columns, device=index.device) + dx[..., None, None].long()
    met = (h >= 0) & (h < rows) & (w >= 0) & (w < columns)
    w = torch.where(flip[..., None, None], columns - 1 - w, w)
    pixels = images[index[..., None, None], h.clamp(0, rows - 1), w.clamp(0, columns - 1)]
    values = (pixels.float() / 255 - mean) / std
    return torch.where(met[..., None], values, torch.zeros(())).to(dtype)


@kernels_run
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("channels", [1, 3])
def test_gather(dtype, channels):
    images = torch.randint(0, 256, (7, 6, 5, channels), dtype=torch.uint8, device=DEVICE)
    index = torch.randint(0, 7, (3, 9), device=DEVICE)
    flip = torch.rand(3, 9, device=DEVICE) < 0.5
    dy, dx = (torch.randint(-3, 4, (3, 9), dtype=torch.int8, device=DEVICE) for _ in range(2))
    mean, std = torch.rand(channels, device=DEVICE), torch.rand(channels, device=DEVICE) + 0.1
    found = layer_kernels.gather(images, index, flip, dy, dx, mean, std, dtype)
    # On the CPU: the batch is the same to the bit on every device.
    images, index, flip, dy, dx, mean, std = (t.cpu() for t in (images, index, flip, dy, dx, mean, std))
    found = found.cpu()
    same(found, plain_gather(images, index, flip, dy, dx, mean, std, dtype))
    # Against torchvision's order of things: flip, then a window of the padded image.
    c, b = 1, 4
    image = (images[index[c, b]].float() / 255 - mean) / std
    image = image.flip(1) if flip[c, b] else image
    padded = F.pad(image, (0, 0, 3, 3, 3, 3))
    top, left = 3 + int(dy[c, b]), 3 + int(dx[c, b])
    same(found[c, b], padded[top : top + 6, left : left + 5].to(dtype))


@kernels_run
def test_double_precision_is_refused():
    with pytest.raises(TypeError, match="float64"):
        layer_kernels.im2col(random(1, 1, 4, 4, 16, dtype=torch.float64), Window(4, 4, (3, 3), (1, 1), (1, 1)), 144)


def test_more_numbers_than_indices_reach_are_refused():
    many = torch.empty(1).expand(2, 2**31)
    triton_support.check("pooling", many[:, 1:])
    with pytest.raises(TooManyElements, match="pooling: got 2,147,483,648 numbers of a client"):
        triton_support.check("pooling", many)


@kernels_run
def test_layers_together():
    """Gradients of a small residual network, as the layers call the kernels."""
    shapes = {
        "stem.weight": (16, 3, 7, 7), "down.weight": (32, 16, 1, 1), "conv.weight": (32, 16, 3, 3),
        "one.weight": (16,), "one.bias": (16,), "two.weight": (32,), "two.bias": (32,),
        "fc.weight": (10, 32), "fc.bias": (10,),
    }  # fmt: skip
    products = {name: (*shape, 1, 1)[:4] for name, shape in shapes.items() if len(shape) > 1}
    layout = Layout(((name, torch.Size(shape)) for name, shape in shapes.items()), products)
    values = torch.stack([layout.pack({name: torch.randn(shape) for name, shape in shapes.items()}) for _ in range(2)])
    x, labels = random(2, 2, 8, 8, 3), torch.tensor([0, 3, 1, 2], device=DEVICE)

    def forward(p):
        y = layers.conv(p, x, "stem.weight", None, Window(8, 8, (7, 7), (2, 2), (3, 3)))
        y = layers.norm(p, y, "one.weight", "one.bias", 2, activation="relu")
        y = p.kernels.max_pool(y, 3, 2, 1) if p.kernels else plain_max_pool(y, 3, 2, 1)
        shortcut = layers.conv(p, y, "down.weight", None, Window(2, 2, (1, 1), (2, 2)))
        y = layers.conv(p, y, "conv.weight", None, Window(2, 2, (3, 3), (2, 2), (1, 1)))
        y = layers.norm(p, y, "two.weight", "two.bias", 2, residual=shortcut, activation="relu")
        return layers.linear(p, y.mean((2, 3)), "fc.weight", "fc.bias")

    results = []
    for chosen in (None, layer_kernels):
        grads = torch.zeros_like(values, device=DEVICE)
        stack = Stack(layout, values.to(DEVICE), grads, chosen)
        loss = F.cross_entropy(forward(stack).flatten(0, 1), labels)
        loss.backward()
        stack.side_stream.join()
        results.append((loss.detach(), grads))
    agree(results[1][0], results[0][0])
    for name, grad in layout.views(results[0][1]).items():
        assert (layout.views(results[1][1])[name] - grad).norm() < 1e-5 * grad.norm(), name
