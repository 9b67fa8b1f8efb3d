"""What ranks on one GPU are told, by the GPU that each of them has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedlada_mpi.gpu import mps
from fedlada_mpi.gpu.sharing import advice
from fedlada_mpi.session.banner import Banner


@pytest.mark.parametrize(
    "gpus", [[], ["", "", ""], ["GPU-a"], ["GPU-a", "GPU-b", ""]], ids=["none", "CPUs", "one", "each its own"]
)
def test_nothing_where_no_gpu_is_shared(gpus):
    assert advice(gpus, by_mps=False) == ("", "")


def test_one_gpu():
    found, cure = advice(["GPU-a"] * 3 + [""], by_mps=False)
    assert found == "3 ranks share a GPU (11 on an H200: 0.41 s, with MPS 0.26 s a round, as one rank 0.16 s)"
    assert cure == "start one rank, without mpirun or -n, or start MPS first: nvidia-cuda-mps-control -d"


def test_several_gpus_take_a_rank_each():
    found, cure = advice([*"abcabca"], by_mps=False)
    assert found.startswith("3 ranks share a GPU (")
    assert cure.startswith("-n 3 --server-trains, or start MPS first")


def test_with_mps_one_rank_is_faster_still():
    found, cure = advice(["a", "a"], by_mps=True)
    assert found == "2 ranks share a GPU by MPS (11 on an H200: 0.26 s a round, as one rank 0.16 s)"
    assert cure == "start one rank, without mpirun or -n"


def test_ranks_that_stay_apart_have_mps_only():
    assert advice(["a", "a"], by_mps=False, may_join=False)[1] == "start MPS first: nvidia-cuda-mps-control -d"
    assert advice(["a", "a"], by_mps=True, may_join=False) == ("", "")


def test_whether_mps_is_running(tmp_path):
    assert mps.is_running({mps.PIPES: str(tmp_path)})
    assert not mps.is_running({mps.PIPES: str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("clients", "secure", "cure"),
    [
        ([[], [0, 1], [2, 3]], False, "start one rank, without mpirun or -n, or start MPS first: "),
        ([[], [0, 1], [2, 3]], True, "start MPS first: "),
        ([[], [0, 1]], False, None),
    ],
    ids=["together", "secure", "the server only serves"],
)
def test_the_banner(clients, secure, cure, monkeypatch, tmp_path):
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "none"))
    session = SimpleNamespace(
        ranks=[{"gpu": "GPU-a"} for _ in clients],
        owners=SimpleNamespace(clients_of=clients),
        data=SimpleNamespace(in_silos=False),
    )
    config = SimpleNamespace(secure=secure, silo_per_rank=False)
    note = Banner._shared_gpus(SimpleNamespace(session=session, config=config))
    measured = "2 ranks share a GPU (11 on an H200: 0.41 s, with MPS 0.26 s a round, as one rank 0.16 s): "
    assert note == ("" if cure is None else f"{measured}{cure}nvidia-cuda-mps-control -d")
