"""Kernels noted in a run without them, and compiled in threads; a stand-in for Triton's compiler notes what it gets."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch

from fedlada_mpi.gpu import channel_kernels, compile_ahead, layer_kernels
from fedlada_mpi.gpu.side_stream import SideStream
from fedlada_mpi.gpu.triton_support import triton
from fedlada_mpi.models.columns import Window

pytestmark = pytest.mark.skipif(
    triton is None or os.environ.get("TRITON_INTERPRET") == "1", reason="has no compiler to stand in for"
)


@pytest.fixture
def compiled(monkeypatch):
    """Every call of the compiler: kernel, arguments, whether it would launch, and on which thread."""
    calls = []

    def run(kernel, *arguments, grid, warmup, **options):
        calls.append((kernel.fn.__name__, arguments, warmup, threading.current_thread()))
        if kernel.fn.__name__ == "_scale":
            raise RuntimeError("does not compile")
        return SimpleNamespace(run=None)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(compile_ahead, "usable_cores", lambda: 2)
    return calls


def test_every_form_is_compiled_once_and_none_is_launched(compiled):
    x, bias = torch.ones(2, 30, 32), torch.ones(2, 40)

    def work():
        for _ in range(2):
            layer_kernels.bias_activation(x, bias[:, :32], "relu")
        layer_kernels.bias_activation(x[:, :17].contiguous(), bias[:, 4:36], "relu")  # another length is the same form
        layer_kernels.bias_activation(x, bias[:, 1:33], "relu")  # another alignment is not
        layer_kernels.bias_activation(x.bfloat16(), bias.bfloat16()[:, :32], "relu")
        layer_kernels.bias_activation(x, bias[:, :32], "silu")

    compile_ahead.compile_ahead(work)
    assert [name for name, *_ in compiled] == ["_bias_activation"] * 4
    forms = {(a[0].dtype, a[1].data_ptr() % 16 == 0, a[5]) for _, a, *_ in compiled}
    assert forms == {
        (torch.float32, True, "relu"),
        (torch.float32, False, "relu"),
        (torch.bfloat16, True, "relu"),
        (torch.float32, True, "silu"),
    }
    assert all(warmup and thread is not threading.main_thread() for *_, warmup, thread in compiled)


def test_what_fails_is_left_to_the_launch(compiled):
    x = torch.ones(1, 3, 16)

    def work():
        layer_kernels.scale(x, x[:, 0])
        layer_kernels.bias_activation(x, x[:, 0], "relu")
        raise RuntimeError("no memory")

    run = triton.JITFunction.run
    compile_ahead.compile_ahead(work)
    assert {name for name, *_ in compiled} == {"_scale", "_bias_activation"}
    assert triton.JITFunction.run is run
    with pytest.raises(RuntimeError, match="does not compile"):
        layer_kernels.scale(x, x[:, 0])


def test_memory_that_no_kernel_wrote_is_zero(compiled):
    outputs, x = [], torch.ones(1, 30, 64)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills it with NaN
    try:
        compile_ahead.compile_ahead(lambda: outputs.append(layer_kernels.bias_activation(x, x[:, 0], "relu")))
    finally:
        torch.use_deterministic_algorithms(before)
    assert not outputs[0].any()


def test_it_does_without_torchs_compiler():
    assert not hasattr(compile_ahead._ZeroedMemory.__torch_dispatch__, "__wrapped__")


def test_kernels_of_others_run(compiled, monkeypatch):
    x = torch.ones(1, 3, 16)
    monkeypatch.setattr(channel_kernels._bias_activation, "module", "elsewhere")
    compile_ahead.compile_ahead(lambda: layer_kernels.bias_activation(x, x[:, 0], "relu"))
    ((_, arguments, warmup, thread),) = compiled
    assert arguments[0] is x
    assert not warmup
    assert thread is threading.main_thread()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_after_it_compiles_nothing(monkeypatch, tmp_path):
    """With Triton's own compiler, into an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: compiled.append(about["src"].name))
    x, dout = torch.randn(2, 2, 5, 37, 1, 48, device="cuda").bfloat16()  # a width that no other test has
    gamma = torch.ones(2, 99, device="cuda").bfloat16()[:, 3:51]

    def work():
        out, mean, rstd = layer_kernels.group_norm(x, gamma, gamma, 3, None, "relu6")
        layer_kernels.group_norm_backward(
            dout, x, gamma, mean, rstd, out, 3, "relu6", False, None, None, SideStream("cuda")
        )
        return out

    compile_ahead.compile_ahead(work)
    assert sorted(compiled) == ["_group_norm", "_group_norm_backward"]
    assert work().isfinite().all()
    assert len(compiled) == 2


def test_grids_of_many_examples_are_along_the_axis_that_is_long_enough(monkeypatch):
    grids = {}

    def run(kernel, *arguments, grid, **options):
        grids[kernel.fn.__name__] = grid

    monkeypatch.setattr(triton.JITFunction, "run", run)
    q = torch.zeros(1, 1, 1, 16).expand(5000, 16, 2, 16).requires_grad_()  # sequences and heads of a large evaluation
    layer_kernels.attention(q, q, q, True, 0.25).sum().backward()
    layer_kernels.column_sums(torch.zeros(1, 1), torch.zeros(1, 17_000_000, 1))
    x, window = torch.zeros(1, 1, 3000, 3000, 1), Window(3000, 3000, (3, 3), (1, 1), (1, 1))
    layer_kernels.depthwise_weight_gradient(torch.zeros(1, 9, 1), x, x, window)
    assert grids.keys() == {"_attention", "_attention_backward", "_column_sums", "_few_taps_gradient"}
    assert grids["_attention"][0] == 80_000
    assert all(max((*grid, 0)[1:]) < 65_536 for grid in grids.values())
