"""The built-in models: plain modules, put onto the stacked layers as users' own are (``translate.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .form import Form

GROUPS = 2
MakeActivation: TypeAlias = Callable[[], nn.Module]


class Activation(nn.Module):
    def __init__(self, name: str, smu_mu: float):
        super().__init__()
        self.name, self.smu_mu = name, smu_mu

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "smu":
            return 0.5 * (x + x * torch.erf(self.smu_mu * x))
        return F.gelu(x, approximate="tanh") if self.name == "gelu" else F.relu(x)


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


def resnet18(classes: int, image_shape: tuple[int, int, int], activation: MakeActivation) -> nn.Module:
    """ResNet-18 with its ImageNet stem; GroupNorm(2) for every BatchNorm."""
    return ResNet18(classes, image_shape[2])


def lenet(classes: int, image_shape: tuple[int, int, int], activation: MakeActivation) -> nn.Module:
    """Two convolutions and two linear layers, as the paper's text has it; their widths are ours."""
    return _lenet("lenet", classes, image_shape, activation, (384,))


def lenet3(classes: int, image_shape: tuple[int, int, int], activation: MakeActivation) -> nn.Module:
    """``lenet`` with the three linear layers of the authors' simulator."""
    return _lenet("lenet3", classes, image_shape, activation, (384, 192))


def _lenet(
    name: str, classes: int, image_shape: tuple[int, int, int], activation: MakeActivation, hidden: Sequence[int]
) -> nn.Module:
    """conv 64, pool, conv 64, pool, linear layers of the ``hidden`` widths, classes."""
    rows, columns, channels = image_shape
    rows, columns = ((s - 4) // 2 - 4 for s in (rows, columns))
    rows, columns = rows // 2, columns // 2
    if rows < 1 or columns < 1:
        raise ValueError(f"{name} needs images of at least 16x16, got {image_shape[0]}x{image_shape[1]}")
    module = nn.Sequential()
    for layer_name, layer in (
        ("conv1", nn.Conv2d(channels, 64, 5)),
        ("act1", activation()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(64, 64, 5)),
        ("act2", activation()),
        ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
    ):
        module.add_module(layer_name, layer)
    width = 64 * rows * columns
    for i, out in enumerate(hidden, 1):
        module.add_module(f"fc{i}", nn.Linear(width, out))
        module.add_module(f"act{i + 2}", activation())
        width = out
    module.add_module(f"fc{len(hidden) + 1}", nn.Linear(width, classes))
    return module


def cnn(classes: int, image_shape: tuple[int, int, int], activation: MakeActivation) -> nn.Module:
    """Two small convolutions and a linear layer; for 8x8 digits and for tests."""
    rows, columns, channels = image_shape
    rows, columns = rows // 2, columns // 2
    module = nn.Sequential()
    for name, layer in (
        ("conv1", nn.Conv2d(channels, 16, 3, padding=1)),
        ("act1", activation()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(16, 32, 3, padding=1)),
        ("act2", activation()),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(32 * rows * columns, classes)),
    ):
        module.add_module(name, layer)
    return module


def linear(outputs: tuple[int, ...], form: Form, activation: MakeActivation) -> nn.Module:
    """One linear layer."""
    return _dense("linear", outputs, form, activation, ())


def mlp(outputs: tuple[int, ...], form: Form, activation: MakeActivation) -> nn.Module:
    """Two hidden layers of 200."""
    return _dense("mlp", outputs, form, activation, (200, 200))


def _dense(
    name: str, outputs: tuple[int, ...], form: Form, activation: MakeActivation, hidden: Sequence[int]
) -> nn.Module:
    if form.single is None:
        raise ValueError(f"{name} takes one array of floating-point numbers, got {form.seen_shape}")
    if form.integers(form.single):
        got = f"{form.single.dtype} {list(form.single.shape)}"
        advice = "prepare the data with --normalise pooled, or as floats"
        raise ValueError(f"{name} takes one array of floating-point numbers, got {got}: {advice}")
    if not form.single.shape:
        raise ValueError(f"{name} takes rows of numbers, got one number for each: give [n, 1], as by inputs[:, None]")
    module, width = nn.Sequential(), prod(form.single.shape)
    module.add_module("flatten", nn.Flatten())
    for i, out in enumerate(hidden, 1):
        module.add_module(f"fc{i}", nn.Linear(width, out))
        module.add_module(f"act{i}", activation())
        width = out
    module.add_module("fc", nn.Linear(width, prod(outputs)))
    if len(outputs) != 1:
        module.add_module("shape", nn.Unflatten(1, outputs))
    return module


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def fcn(outputs: tuple[int, ...], form: Form, activation: MakeActivation) -> nn.Module:
    """Three convolutions that keep the size of a map or volume: a number per class and pixel."""
    shape = form.single.shape if form.single else ()
    channels, size = (shape[-1], shape[:-1]) if form.image else (shape[:1][0] if shape else 0, shape[1:])
    if len(size) not in CONVOLUTIONS or outputs[1:] != size:
        raise ValueError(f"fcn gives a number per class and pixel, got {form.seen_shape} and outputs {list(outputs)}")
    if form.single is not None and form.integers(form.single):
        raise ValueError(
            f"fcn takes floating-point numbers, got {form.single.dtype}: prepare the data with --normalise pooled"
        )
    convolution = CONVOLUTIONS[len(size)]
    module = nn.Sequential()
    for name, layer in (
        ("conv1", convolution(channels, 16, 3, padding=1)),
        ("act1", activation()),
        ("conv2", convolution(16, 16, 3, padding=1)),
        ("act2", activation()),
        ("conv3", convolution(16, outputs[0], 1)),
    ):
        module.add_module(name, layer)
    return module


class CausalCNN(nn.Module):
    """What comes next after each of a row of tokens, from the tokens up to it: two causal convolutions."""

    def __init__(self, tokens: int, activation: MakeActivation, width: int = 64, reach: int = 8):
        super().__init__()
        self.reach = reach
        self.embedding = nn.Embedding(tokens, width)
        self.conv1, self.conv2 = nn.Conv1d(width, width, reach), nn.Conv1d(width, width, reach)
        self.act1, self.act2 = activation(), activation()
        self.fc = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        x = self.act1(self.conv1(F.pad(x, (self.reach - 1, 0))))
        x = self.act2(self.conv2(F.pad(x, (self.reach - 1, 0))))
        return self.fc(x.transpose(1, 2))


def causal_cnn(outputs: tuple[int, ...], form: Form, activation: MakeActivation) -> nn.Module:
    """For text: the next token, of those up to 14 before it."""
    if not form.tokens(form.single) or len(outputs) != 2:
        raise ValueError(f"causal_cnn takes rows of tokens, got {form.seen_shape}")
    return CausalCNN(outputs[1], activation)
