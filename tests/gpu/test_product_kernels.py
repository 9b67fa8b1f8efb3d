"""Products and convolutions by tiles, on a GPU or in Triton's interpreter, and where the library's are taken."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import CUDA, DEVICE, kernels_run, poison, random  # noqa: F401
from torch import Tensor

from fedlada_mpi import models
from fedlada_mpi.gpu import convolution_kernels, layer_kernels, product_kernels
from fedlada_mpi.gpu.product_kernels import AT_ONCE, Tiling, tiling_of
from fedlada_mpi.gpu.products import library_product
from fedlada_mpi.models.columns import Window
from fedlada_mpi.rounds.gradients import StackedEngine
from fedlada_mpi.support.user_code import Given

# The interpreter has no products of bfloat16.
TYPES = (torch.float32, torch.bfloat16) if CUDA else (torch.float32,)


def close(found: Tensor, exact: Tensor) -> None:
    """To what the inputs of a product are rounded to: on a GPU ten bits of a float32."""
    error = (found.double() - exact.double()).norm() / exact.double().norm()
    assert error < (6e-3 if found.dtype == torch.bfloat16 else 2e-3 if CUDA else 2e-6), f"relative error {error:.2e}"


def stored(rows: int, columns: int, turned: bool, dtype: torch.dtype) -> Tensor:
    """Two matrices inside flat vectors, as in a layout; turned ones are transposed views."""
    flat = random(2, rows * columns + 24, dtype=dtype)[:, 16 : 16 + rows * columns]
    return flat.view(2, columns, rows).mT if turned else flat.view(2, rows, columns)


@kernels_run
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("a_turned", "b_turned"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("tiling", [Tiling(32, 32, 64), Tiling(64, 32, 32, 3), Tiling(32, 64, 32, 2)])
def test_products_by_tiles(tiling, a_turned, b_turned, dtype):
    m, n, length = 70, 41, 200
    a, b = stored(m, length, a_turned, dtype), stored(length, n, b_turned, dtype)
    bias = random(2, 3 * n, dtype=dtype)[:, n : 2 * n]
    whole = torch.full((2, m * n + 9), float("nan"), dtype=dtype, device=DEVICE)
    out, exact = whole[:, 5 : 5 + m * n].view(2, m, n), a.double() @ b.double()
    product_kernels.tiled_product(a, b, out, tiling)
    close(out, exact)
    found = out.clone()
    product_kernels.tiled_product(a, b, out, tiling)
    assert torch.equal(out, found)
    assert whole[:, :5].isnan().all()
    assert whole[:, 5 + m * n :].isnan().all()
    product_kernels.tiled_product(a, b, out, tiling, bias)
    close(out, exact + bias.double().unsqueeze(1))
    assert not any(zeros.any() for zeros in product_kernels._arrivals.values())


@kernels_run
def test_only_some_products_are_by_tiles(monkeypatch):
    tiled = []
    monkeypatch.setattr(product_kernels, "tiled_product", lambda a, b, out, tiling, bias: tiled.append(tiling))
    a, b = random(1, 50, 512), random(1, 512, 512)
    monkeypatch.setattr(product_kernels, "launches_overlap", lambda: True)
    assert torch.equal(layer_kernels.product(a, b), library_product(a, b))  # as float32 is not to be rounded
    torch.backends.cuda.matmul.allow_tf32 = True  # until the end of the test
    layer_kernels.product(a, b)
    assert len(tiled) == 1
    monkeypatch.setattr(product_kernels, "launches_overlap", lambda: False)
    assert torch.equal(layer_kernels.product(a, b), library_product(a, b))
    assert len(tiled) == 1


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("a_turned", "b_turned"), [(False, False), (False, True), (True, False)])
def test_tiles_fit_on_a_gpu_at_once(a_turned, b_turned, size):
    """One model's layers are by tiles, ten larger ones' are not."""
    taken = 0
    for m in (1, 10, 50, 200, 288, 800, 3200):
        for n in (10, 32, 64, 256, 512):
            for length in (1, 50, 512, 2304, 3200, 12800):
                for count in (1, 3, 10, 30):
                    tiling = tiling_of(m, n, length, count, size, a_turned, b_turned)
                    if tiling is not None:
                        tiles = -(-m // tiling.rows) * -(-n // tiling.columns) * count
                        assert tiles * tiling.shares <= 2 * AT_ONCE
                        operands = (tiling.rows + tiling.columns) * tiling.depth * size * product_kernels.STAGES
                        assert operands <= 128 * 2**10  # of shared memory, in which a Hopper GPU has 227 kB
                        taken += 1
    assert taken
    assert tiling_of(50, 512, 512, 1, size, a_turned, b_turned) is not None
    assert tiling_of(32000, 512, 512, 10, size, a_turned, b_turned) is None


@kernels_run
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "channels", "out", "kernel"), [(8, 8, 64, 32, 3), (2, 2, 32, 64, 3), (3, 5, 32, 96, 5)]
)
def test_convolutions_of_maps(rows, columns, channels, out, kernel, dtype):
    window = Window(rows, columns, (kernel, kernel), (1, 1), (kernel // 2, kernel // 2))
    (r0, r1), (c0, c1) = window.taps
    x, dout = random(2, 3, rows, columns, channels, dtype=dtype), random(2, 3, rows, columns, out, dtype=dtype)
    weight = stored((r1 - r0) * (c1 - c0) * channels, out, False, dtype)
    exact, gradient = [], []
    for image, kernels, cotangent in zip(x.double(), weight.double(), dout.double(), strict=True):
        whole = kernels.new_zeros(out, channels, kernel, kernel)
        whole[:, :, r0:r1, c0:c1] = kernels.view(r1 - r0, c1 - c0, channels, out).permute(3, 2, 0, 1)
        image = image.permute(0, 3, 1, 2).requires_grad_()
        result = F.conv2d(image, whole, padding=kernel // 2)
        exact.append(result.detach().permute(0, 2, 3, 1))
        gradient.append(torch.autograd.grad(result, image, cotangent.permute(0, 3, 1, 2))[0].permute(0, 2, 3, 1))
    close(layer_kernels.convolution(x, weight, window), torch.stack(exact))
    close(layer_kernels.convolution_input_gradient(dout, weight, window), torch.stack(gradient))


class Residual(torch.nn.Module):
    """A map that a convolution and an addition read."""

    def __init__(self, *shape: object):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.second = torch.nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norm, self.last = torch.nn.GroupNorm(2, 32), torch.nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last((x + self.second(x)).relu().mean((2, 3)))


@kernels_run
def test_layers_by_tiles(monkeypatch):
    """A step's gradients are those of plain torch in float64."""
    convolved, tiled = convolution_kernels._convolved, product_kernels.tiled_product
    calls = []
    for module in (convolution_kernels, product_kernels):
        monkeypatch.setattr(module, "launches_overlap", lambda: True)
    torch.backends.cuda.matmul.allow_tf32 = True  # until the end of the test
    monkeypatch.setattr(convolution_kernels, "_convolved", lambda *a: calls.append("map") or convolved(*a))
    monkeypatch.setattr(product_kernels, "tiled_product", lambda *a: calls.append("tiles") or tiled(*a))
    network = models.build(Given(Residual), 10, (3, 4, 3))
    values = network.initial() + 0.1 * torch.randn(2, network.layout.size)
    images, labels = torch.randn(2, 3, 3, 4, 3), torch.randint(0, 10, (2, 3))
    found = []
    for kernels, device, dtype in ((layer_kernels, DEVICE, torch.float32), (None, "cpu", torch.float64)):
        batch = (images.to(device, dtype), labels.to(device), torch.full((2, 3), 1 / 3, device=device))
        mine = values.to(device, dtype)
        grads = torch.zeros_like(mine)
        StackedEngine(network, kernels, device).gradients(mine, grads, *batch, torch.arange(2, device=device))
        found.append(grads.double().cpu())
    assert calls.count("map") == 2  # forward and backward
    assert calls.count("tiles") >= 4
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert error < (3e-2 if CUDA else 1e-5)  # of TF32 in several layers, and of float32


@kernels_run
def test_maps_beyond_the_indices_of_kernels_have_columns(monkeypatch):
    """As whose check refuses them in one line; also where only the result has so many numbers."""
    monkeypatch.setattr(convolution_kernels, "launches_overlap", lambda: True)
    torch.backends.cuda.matmul.allow_tf32 = True
    window = Window(224, 224, (3, 3), (1, 1), (1, 1))
    weight = torch.zeros(1, 9 * 32, 64, device=DEVICE)
    monkeypatch.setattr(convolution_kernels, "computes", lambda *tensors: True)
    for images, taken in ((650, True), (700, False)):
        x = torch.zeros(1, 1, 1, 1, 1, device=DEVICE).expand(1, images, 224, 224, 32)
        assert layer_kernels.convolves(x, window, weight) == taken


@kernels_run
def test_a_norm_gives_columns_to_a_convolution_with_a_bias(monkeypatch):
    """Which does not read the map, unlike one without."""
    for module in (convolution_kernels, product_kernels):
        monkeypatch.setattr(module, "launches_overlap", lambda: True)
    torch.backends.cuda.matmul.allow_tf32 = True
    calls = []
    for name in ("norm_columns", "convolution"):
        function = getattr(layer_kernels, name)
        monkeypatch.setattr(layer_kernels, name, lambda *a, n=name, f=function: calls.append(n) or f(*a))
    for bias, expected in ((True, "norm_columns"), (False, "convolution")):
        module = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 1), torch.nn.GroupNorm(2, 32), torch.nn.ReLU(),
            torch.nn.Conv2d(32, 32, 3, padding=1, bias=bias), torch.nn.Flatten(), torch.nn.Linear(32 * 12, 10),
        )  # fmt: skip
        network = models.build(Given(lambda *shape, module=module: module), 10, (3, 4, 3))
        values = network.initial().expand(2, -1).contiguous().to(DEVICE)
        batch = (random(2, 3, 3, 4, 3), torch.zeros(2, 3, dtype=torch.int64, device=DEVICE))
        weight, keys = torch.full((2, 3), 1 / 3, device=DEVICE), torch.arange(2, device=DEVICE)
        engine = StackedEngine(network, layer_kernels, DEVICE)
        engine.gradients(values, torch.zeros_like(values), *batch, weight, keys)
        assert calls == [expected]
        calls.clear()
