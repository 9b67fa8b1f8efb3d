"""The threads that a rank computes with, by the work of its steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedlada_mpi import device, models

pytestmark = pytest.mark.serial


@pytest.fixture
def threads(monkeypatch):
    """The number of threads for so much work, on eight cores that two ranks share."""
    monkeypatch.setattr(device, "usable_cores", lambda: 8)
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
