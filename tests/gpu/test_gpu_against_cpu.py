"""The GPU path against the CPU path; skipped where there is no GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from noisy_method import Noisy

from fedlada_mpi import algorithms
from fedlada_mpi.algorithms import Algorithm, resolve
from fedlada_mpi.bench import Bench, Workload
from fedlada_mpi.gpu.side_stream import SideStream
from fedlada_mpi.models import layers

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
CUDA = torch.device("cuda", 0)


def moved(device: torch.device, **settings) -> dict[str, torch.Tensor]:
    """What three clients send after two rounds from the same state, as flat torch-ordered vectors."""
    bench = Bench(
        Workload.of_images(resolve({"dataset": "cifar10", "batch_size": 8, "local_steps": 3, **settings}).config),
        3,
        device,
    )
    for _ in range(2):
        bench.round()
    layout = bench.network.layout
    return {k: flat(layout, v) for k, v in bench.sums.vectors.items()}


def flat(layout, vector: torch.Tensor) -> torch.Tensor:
    return torch.cat([p.flatten() for p in layout.unpack(vector.cpu()).values()]).double()


def distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", algorithms.names())
def test_every_method_as_on_the_cpu(name):
    """With a smooth model: one maximum of a pooling that rounding moves to the next pixel is a larger difference."""
    own = {"algorithm": name, "model": "model_zoo:mlp"}
    cpu = moved(torch.device("cpu"), **own, precision="fp64")
    for precision, bound in (("fp64", 1e-10), ("fp32", 1e-4)):
        gpu = moved(CUDA, **own, precision=precision)
        for quantity, reference in cpu.items():
            # In a full gradient, the images' own gradients nearly cancel.
            loose = 10 if algorithms.find(name).full_gradient else 1
            assert distance(gpu[quantity], reference) < bound * loose, (precision, quantity)


OWN = """
import torch
from torch import nn

class Depth(nn.Module):
    def forward(self, x):
        keep = torch.empty(len(x), 1, dtype=x.dtype, device=x.device)
        return x * keep.bernoulli_(0.5) if self.training else x

def model(classes, image_shape, *more):
    frozen = nn.Conv2d(3, 8, 3, stride=2).requires_grad_(False)
    return nn.Sequential(frozen, nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.5), *more,
                         nn.Linear(8 * 15 * 15, classes))

def one_by_one(classes, image_shape):
    return model(classes, image_shape, Depth())
"""


@pytest.mark.parametrize("function", ["model", "one_by_one"])
def test_random_and_frozen_layers_as_on_the_cpu(tmp_path, monkeypatch, function):
    """Replayed from a graph, or one client after another: the same elements are dropped."""
    (tmp_path / "own_on_gpu.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_on_gpu", raising=False)
    own = {"algorithm": "fedlada", "model": f"own_on_gpu:{function}"}
    cpu = moved(torch.device("cpu"), **own, precision="fp64")
    for precision, bound in (("fp64", 1e-10), ("fp32", 1e-3), ("bf16", 0.5)):
        for quantity, reference in cpu.items():
            assert distance(moved(CUDA, **own, precision=precision)[quantity], reference) < bound, precision


def test_what_methods_draw_is_what_they_draw_on_the_cpu(monkeypatch):
    """Replayed from a graph: each step draws its own numbers, those of the CPU."""
    monkeypatch.setattr(Noisy, "start", Algorithm.start)  # whose draws are the run's, and here is none
    own = {"algorithm": "noisy_method:Noisy", "model": "model_zoo:mlp", "precision": "fp64"}
    cpu, gpu = (moved(device, **own) for device in (torch.device("cpu"), CUDA))
    assert distance(gpu["offset"], cpu["offset"]) < 1e-9


def gradient(precision: str, device: torch.device, **settings) -> torch.Tensor:
    """Gradients of three ResNets on their first batches: what one step of plain SGD without decay moves by."""
    plain = {"algorithm": "fedavg", "lr": 1e-3, "weight_decay": 0, "clip": 0}
    shape = {"dataset": "cifar10", "batch_size": 16, "local_steps": 1, "precision": precision}
    config = resolve({**plain, **shape, **settings}).config
    bench = Bench(Workload.of_images(config), 3, device)
    bench.round()
    return flat(bench.network.layout, bench.sums.vectors["offset"])


ZOO = [
    "vgg11",
    "LeNet",
    "mlp",
    "ConvNeXt",
    "separable",
    "Odd",
    "InPlace",
    "Attention",
    "Shared",
    "Dropping",
    "dropped_map",
]


@pytest.mark.parametrize("name", ZOO)
def test_users_models_as_on_the_cpu(name):
    model = f"model_zoo:{name}"
    reference = gradient("fp64", torch.device("cpu"), model=model, lr=1.0)
    double = 1e-7 if name == "separable" else 1e-9  # torch's Hardswish divides by 6 in float32 on a GPU
    for precision, bound in (("fp64", double), ("fp32", 1e-3), ("bf16", 0.3)):
        assert distance(gradient(precision, CUDA, model=model, lr=1.0), reference) < bound, precision


def test_each_precision_on_one_step():
    reference = gradient("fp64", torch.device("cpu"))
    found = {p: distance(gradient(p, CUDA), reference) for p in ("fp64", "fp32", "tf32", "bf16")}
    print(found)
    bounds = {"fp64": 1e-9, "fp32": 1e-4, "tf32": 3e-2, "bf16": 2e-1}
    assert all(found[p] < bounds[p] for p in bounds), found


@pytest.mark.parametrize("compiler", ["auto", "off"])
def test_batches_are_the_cpus_to_the_bit(compiler):
    settings = {"dataset": "cifar10", "local_steps": 3, "batch_size": 8, "precision": "fp32", "compile": compiler}
    found = []
    for device in (torch.device("cpu"), CUDA):
        bench = Bench(Workload.of_images(resolve(settings).config), 2, device)
        bench.round()
        found.append(bench.trainer.gather(bench.trainer.buffers.plan.at(2, 2)).cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "settings", [{"precision": "fp32"}, {"precision": "fp32", "compile": "off"}, {"precision": "fp64"}]
)
def test_evaluation_as_on_the_cpu(settings):
    """Twice, as the second one is a replay; with a batch that is cut short."""
    found = []
    for device in (torch.device("cpu"), CUDA):
        bench = Bench(Workload.of_images(resolve({"dataset": "cifar10", **settings}).config), 11, device)
        evaluation = bench.evaluation()
        evaluation()
        bench.s.x.mul_(1.5)
        found.append(evaluation())
    (loss, correct, count), (gpu_loss, gpu_correct, gpu_count) = found
    assert count == gpu_count == 5500
    assert gpu_loss == pytest.approx(loss, rel=1e-5)
    assert abs(correct - gpu_correct) <= 3  # logits that are all but equal


def test_without_a_compiler():
    """The captured plain path is the kernels' specification."""
    assert distance(gradient("fp32", CUDA, compile="off"), gradient("fp32", CUDA)) < 1e-4


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_evaluation_by_the_librarys_convolutions_as_by_columns(precision, monkeypatch):
    found = []
    for _ in range(2):
        found.append(
            Bench(
                Workload.of_images(resolve({"dataset": "cifar10", "precision": precision}).config), 11, CUDA
            ).evaluation()()
        )
        monkeypatch.setattr(layers, "use_library", lambda x, window, groups=1: False)
    (loss, correct, _), (by_columns, correct_by_columns, _) = found
    assert loss == pytest.approx(by_columns, rel=1e-4)
    assert abs(correct - correct_by_columns) <= 10  # of 5,500


@pytest.mark.parametrize("compiler", ["auto", "off"])
def test_work_on_the_side_stream_changes_no_bit(compiler, monkeypatch):
    """Memory handed on too early, or a result read before it is there, would show here."""
    settings = {"dataset": "cifar10", "local_steps": 6, "precision": "tf32", "compile": compiler}
    found = []
    for _ in range(2):
        bench = Bench(Workload.of_images(resolve(settings).config), 4, CUDA)
        bench.round()
        bench.round()
        found.append(bench.sums.vectors["offset"])
        monkeypatch.setattr(SideStream, "submit", lambda self, work, *reads: work())
    assert torch.equal(*found)


def test_uneven_draws_compile_nothing():
    settings = {"dataset": "cifar10", "batch_size": 8, "local_steps": 2, "precision": "fp32"}
    bench = Bench(Workload.of_images(resolve(settings).config), 4, CUDA)
    bench.round()
    step = bench.trainer.local_step
    made = dict(step._made)
    for clients in (2, 3, 1):
        bench.clients = clients
        bench.round()
    assert bench.trainer.local_step is step
    assert step._made == made
