"""The threads that a rank computes with, by the work of its steps, and the types that it computes in."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fedlada_mpi import models
from fedlada_mpi.rounds import device
from fedlada_mpi.session.process_state import torch_state_restored


@pytest.fixture
def threads(monkeypatch):
    """The number of threads for so much work, on eight cores that two ranks share."""
    monkeypatch.setattr(device, "bound_cores", lambda: 8)
    monkeypatch.setattr(device, "core_limit", lambda: math.inf)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()

    def of(work: int) -> int:
        device.limit_threads(SimpleNamespace(node=SimpleNamespace(size=2)), torch.device("cpu"), work)
        return torch.get_num_threads()

    yield of
    torch.set_num_threads(before)


@pytest.mark.parametrize(("work", "expected"), [(0, 1), (199_999_999, 1), (300_000_000, 3), (10**12, 4)])
def test_threads_follow_the_work_up_to_the_ranks_share(work, expected, threads):
    assert threads(work) == expected


@pytest.mark.parametrize(("limit", "expected"), [(7.9, 3), (1.5, 1), (64, 4)])
def test_ranks_share_what_a_container_may_use(limit, expected, threads, monkeypatch):
    monkeypatch.setattr(device, "core_limit", lambda: limit)
    assert threads(10**12) == expected


def test_omp_num_threads_wins(threads, monkeypatch):
    torch.set_num_threads(3)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(0) == 3


@pytest.mark.parametrize(
    ("name", "image_shape", "expected"),
    [
        # 8*8*16*9 + 4*4*32*16*9 + 32*4*4*10
        ("cnn", (8, 8, 1), 88_064),
        # 28*28*64*75 + 10*10*64*1600 + 1600*384 + 384*10
        ("lenet", (32, 32, 3), 14_621_440),
    ],
)
def test_the_work_of_a_model(name, image_shape, expected):
    network = models.build(name, 10, image_shape)
    assert network.work == expected
    assert network.module.training


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("precision", "refused", "stays"),
    [("bf16", True, False), ("bf16", False, True), ("fp32", True, True), ("tf32", True, True), ("fp64", True, True)],
)
def test_onednn_is_off_where_it_refuses_bf16_and_only_during_a_run(precision, refused, stays, before, monkeypatch):
    """Torch itself would switch it off at the first product, with a warning, and for good."""
    monkeypatch.setattr(device, "onednn_refuses_bf16", lambda: refused)
    at_first = bool(torch.backends.mkldnn.enabled)
    device.set_onednn(before)
    try:
        with torch_state_restored():
            device.set_precision(precision)
            assert torch.backends.mkldnn.enabled == (before and stays)
        assert torch.backends.mkldnn.enabled == before
    finally:
        device.set_onednn(at_first)


def test_bf16_products_without_a_warning():
    a = torch.rand(2, 64, 48).bfloat16()
    with torch_state_restored(), warnings.catch_warnings():
        device.set_precision("bf16")
        warnings.simplefilter("error")
        product = torch.bmm(a, a.mT)
        F.linear(a, a[0])
    expected = torch.bmm(a.double(), a.mT.double())
    assert ((product - expected).abs() <= 2.0**-8 * expected).all(), "rounded to 8 significant bits"


@pytest.mark.parametrize(
    ("supported", "available", "refused"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_whether_onednn_refuses_bf16(supported, available, refused, monkeypatch):
    ops = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: supported)
    monkeypatch.setattr(torch.ops, "mkldnn", ops)
    monkeypatch.setattr(torch.backends.mkldnn.m, "is_available", lambda: available)
    assert device.onednn_refuses_bf16() == refused
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert not device.onednn_refuses_bf16(), "a torch that does not tell"


EMULATED = "bf16 is emulated, --precision fp32 is faster"
BOTH = "bf16 forward and backward, fp32 states and sums"
X86, ARM = "processor : 0\nmodel name\t: a CPU\nflags\t\t: fpu {}\nbugs\t: bf16\n", "BogoMIPS : 2\nFeatures\t: fp {}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "refused", "native"),
    [
        (X86.format("avx512f avx512_bf16"), False, True),
        (X86.format("avx512f amx_bf16 sha_ni"), False, True),
        (X86.format("avx512f"), False, False),
        (X86.format("avx2"), True, False),
        (ARM.format("asimd bf16"), False, True),
        (ARM.format("sve svebf16"), False, True),
        (ARM.format("asimd"), True, False),
        ("processor : 0\n", False, True),
        (None, False, True),
        (None, True, False),
    ],
)
def test_bf16_on_a_cpu(cpuinfo, refused, native, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(device, "onednn_refuses_bf16", lambda: refused)
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    cpu = torch.device("cpu")
    assert device.arithmetic("bf16", cpu) == BOTH
    found = device.precision_notes("bf16", cpu)
    assert found == ([] if native else [f"this CPU has no bf16 instructions: {EMULATED}"])
    assert device.precision_notes("fp32", cpu) == device.precision_notes("tf32", cpu) == []


def test_other_precisions_on_a_cpu():
    cpu = torch.device("cpu")
    found = [device.arithmetic(precision, cpu) for precision in ("fp64", "fp32", "tf32")]
    assert found == ["fp64", "fp32", "fp32 (tf32 is for GPUs)"]


@pytest.mark.parametrize(
    ("capability", "tf32", "notes"),
    [
        ((9, 0), "tf32 products, all else fp32", []),
        ((8, 0), "tf32 products, all else fp32", []),
        ((7, 5), "fp32 (this GPU has no tf32)", [f"this GPU has no bf16 tensor cores: {EMULATED}"]),
    ],
)
def test_precisions_on_a_gpu(capability, tf32, notes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: capability)
    monkeypatch.setattr(device, "cpu_flags", lambda: {"fp"})
    gpu = torch.device("cuda", 0)
    found = [device.arithmetic(precision, gpu) for precision in ("fp64", "fp32", "tf32", "bf16")]
    assert found == ["fp64", "fp32", tf32, BOTH]
    assert device.precision_notes("bf16", gpu) == notes
    assert device.precision_notes("tf32", gpu) == []
