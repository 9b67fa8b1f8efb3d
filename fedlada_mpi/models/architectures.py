"""The built-in models, each twice over the same parameters: the plain ``nn.Module`` that users load
``model.pt`` into, and a stacked forward (``layers.py``) that trains C of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import layers
from .layers import Stack
from .layout import Kernel

GROUPS = 2
SMU_MU = 2.5  # the paper leaves mu open; the larger, the closer to ReLU

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "smu": lambda x: 0.5 * (x + x * torch.erf(SMU_MU * x)),
}


# The plain module, the stacked forward over the same parameters, and the shapes that linear layers after a map have as
# kernels over it, by the name of their weights.
Architecture: TypeAlias = tuple[nn.Module, Callable[[Stack, Tensor], Tensor], dict[str, Kernel]]


class Activation(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.name](x)


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        downsample = None
        if stride != 1 or channels != out:
            downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.GroupNorm(GROUPS, out))
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.GroupNorm(GROUPS, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.GroupNorm(GROUPS, out)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


class ResNet18(nn.Module):
    """torchvision's ``resnet18(norm_layer=GroupNorm(2, .))``: same names, same initial values, same outputs.

    Importing torchvision itself takes longer than everything else before the first step.
    """

    def __init__(self, classes: int, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.GroupNorm(GROUPS, 64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        widths = (64, 64, 128, 256, 512)
        for i in range(1, 5):
            first = BasicBlock(widths[i - 1], widths[i], 1 if i == 1 else 2)
            self.add_module(f"layer{i}", nn.Sequential(first, BasicBlock(widths[i], widths[i], 1)))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(x.mean((2, 3)))


def resnet18(classes: int, image_shape: tuple[int, int, int], activation: str) -> Architecture:
    """ResNet-18 with its ImageNet stem; GroupNorm(2) for every BatchNorm."""
    module = ResNet18(classes, image_shape[2])

    def block(p: Stack, name: str, x: Tensor, stride: int) -> Tensor:
        shortcut = x
        if f"{name}.downsample.0.weight" in p.value:
            shortcut = layers.conv(p, f"{name}.downsample.0", x, 1, stride)
            shortcut = layers.norm(p, f"{name}.downsample.1", shortcut, GROUPS, relu=False)
        x = layers.conv(p, f"{name}.conv1", x, 3, stride, padding=1)
        x = layers.norm(p, f"{name}.bn1", x, GROUPS)
        x = layers.conv(p, f"{name}.conv2", x, 3, padding=1)
        return layers.norm(p, f"{name}.bn2", x, GROUPS, residual=shortcut)

    def forward(p: Stack, x: Tensor) -> Tensor:
        x = layers.conv(p, "conv1", x, 7, stride=2, padding=3)
        x = layers.max_pool(p, layers.norm(p, "bn1", x, GROUPS), 3, stride=2, padding=1)
        for layer in range(1, 5):
            x = block(p, f"layer{layer}.0", x, 1 if layer == 1 else 2)
            x = block(p, f"layer{layer}.1", x, 1)
        return layers.linear(p, "fc", x.mean((2, 3)))

    return module, forward, {}


def lenet(classes: int, image_shape: tuple[int, int, int], activation: str) -> Architecture:
    """conv 64, pool, conv 64, pool, 384, 192, classes."""
    rows, columns, channels = image_shape
    rows, columns = ((s - 4) // 2 - 4 for s in (rows, columns))
    rows, columns = rows // 2, columns // 2
    if rows < 1 or columns < 1:
        raise ValueError(f"lenet needs images of at least 16x16, got {image_shape[0]}x{image_shape[1]}")
    module = nn.Sequential()
    for name, layer in (
        ("conv1", nn.Conv2d(channels, 64, 5)),
        ("act1", Activation(activation)),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(64, 64, 5)),
        ("act2", Activation(activation)),
        ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(64 * rows * columns, 384)),
        ("act3", Activation(activation)),
        ("fc2", nn.Linear(384, 192)),
        ("act4", Activation(activation)),
        ("fc3", nn.Linear(192, classes)),
    ):
        module.add_module(name, layer)
    act = ACTIVATIONS[activation]

    def forward(p: Stack, x: Tensor) -> Tensor:
        x = layers.max_pool(p, act(layers.conv(p, "conv1", x, 5)), 2)
        x = layers.max_pool(p, act(layers.conv(p, "conv2", x, 5)), 2)
        x = act(layers.linear(p, "fc1", x))
        return layers.linear(p, "fc3", act(layers.linear(p, "fc2", x)))

    return module, forward, {"fc1.weight": (384, 64, rows, columns)}


def cnn(classes: int, image_shape: tuple[int, int, int], activation: str) -> Architecture:
    """Two small convolutions and a linear layer; for 8x8 digits and for tests."""
    rows, columns, channels = image_shape
    rows, columns = rows // 2, columns // 2
    module = nn.Sequential()
    for name, layer in (
        ("conv1", nn.Conv2d(channels, 16, 3, padding=1)),
        ("act1", Activation(activation)),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(16, 32, 3, padding=1)),
        ("act2", Activation(activation)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(32 * rows * columns, classes)),
    ):
        module.add_module(name, layer)
    act = ACTIVATIONS[activation]

    def forward(p: Stack, x: Tensor) -> Tensor:
        x = layers.max_pool(p, act(layers.conv(p, "conv1", x, 3, padding=1)), 2)
        return layers.linear(p, "fc", act(layers.conv(p, "conv2", x, 3, padding=1)))

    return module, forward, {"fc.weight": (classes, 32, rows, columns)}
