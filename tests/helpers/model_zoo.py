"""Models as users write them, made of common and of uncommon layers, for images of 32x32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def vgg11(classes, image_shape):
    widths = [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]
    blocks, channels = [], image_shape[2]
    for width in widths:
        if width == "M":
            blocks.append(nn.MaxPool2d(2, 2))
        else:
            blocks += [nn.Conv2d(channels, width // 16, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width // 16
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, classes))


class LeNet(nn.Module):
    def __init__(self, classes, image_shape):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(image_shape[2], 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def mlp(classes, image_shape):
    size = image_shape[0] * image_shape[1] * image_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, classes))


class ConvNeXt(nn.Module):
    """Two blocks, one with axes turned to channels-last as in the original, one with 1x1 convolutions."""

    def __init__(self, classes, image_shape):
        super().__init__()
        self.stem = nn.Conv2d(image_shape[2], 12, 4, stride=4)
        self.depthwise = nn.Conv2d(12, 12, 7, padding=3, groups=12)
        self.norm = nn.LayerNorm(12, eps=1e-6)
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)
        self.scale = nn.Parameter(torch.full((12,), 0.1))
        self.second = nn.Sequential(
            nn.Conv2d(12, 12, 5, padding=2, groups=12), nn.GroupNorm(1, 12), nn.Conv2d(12, 24, 1)
        )
        self.project = nn.Conv2d(24, 12, 1)
        self.layer_scale = nn.Parameter(torch.full((12, 1, 1), 0.2))
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        x = self.stem(x)
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.down(F.gelu(self.up(self.norm(y))))
        x = x + (self.scale * y).permute(0, 3, 1, 2)
        x = x + self.layer_scale * self.project(F.silu(self.second(x)))
        return self.head(x.mean([-2, -1]))


def separable(classes, image_shape):
    def block(channels, out, stride):
        depthwise = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        return [depthwise, nn.GroupNorm(2, channels), nn.ReLU6(), nn.Conv2d(channels, out, 1), nn.Hardswish()]

    return nn.Sequential(
        nn.Conv2d(image_shape[2], 8, 3, 2, 1), *block(8, 12, 1), *block(12, 16, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, classes),
    )  # fmt: skip


class Odd(nn.Module):
    """Grouped, dilated and uneven convolutions, concatenation, squeeze and excitation, other norms and poolings."""

    def __init__(self, classes, image_shape):
        super().__init__()
        self.grouped = nn.Conv2d(image_shape[2], 8, (3, 5), padding="same")
        self.branch = nn.Conv2d(8, 12, 3, padding=2, dilation=2, groups=4)
        self.uneven = nn.Conv2d(20, 10, 3, stride=(2, 1), padding=(0, 1), bias=False)
        self.instance = nn.InstanceNorm2d(10, affine=True)
        self.squeeze, self.excite = nn.Conv2d(10, 3, 1), nn.Conv2d(3, 10, 1)
        self.multiplied = nn.Conv2d(10, 20, 3, groups=10)
        self.free = nn.GroupNorm(4, 20, affine=False)
        self.fc = nn.Linear(20 * 2 * 2, classes)

    def forward(self, x):
        x = F.leaky_relu(self.grouped(x), 0.1)
        x = torch.cat([x, self.branch(x)], 1)
        x = self.instance(self.uneven(x))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        x = self.free(self.multiplied(x * gate))
        x = F.avg_pool2d(x, 2, ceil_mode=True)
        return self.fc(torch.flatten(F.adaptive_max_pool2d(x, (2, 2)), 1))


class InPlace(nn.Module):
    """Layers that change their inputs, which are then used again."""

    def __init__(self, classes, image_shape):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(image_shape[2], 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.relu, self.again = nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, classes)

    def forward(self, x):
        x = self.norm(self.conv(x))
        y = self.again(self.relu(x))
        y += x
        y.mul_(0.5)
        return self.fc(F.relu(y, inplace=True).mean((2, 3)))


class Attention(nn.Module):
    """A small vision transformer with its attention written out."""

    def __init__(self, classes, image_shape):
        super().__init__()
        self.patches = nn.Conv2d(image_shape[2], 8, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.position = nn.Parameter(0.1 * torch.randn(1, 17, 8))
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.fc = nn.Linear(8, classes)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        n = x.shape[0]
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(n, -1, -1), x], dim=1) + self.position
        q, k, v = self.qkv(self.norm(x)).reshape(n, 17, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, 17, 8))
        return self.fc(x[:, 0])


class Shared(nn.Module):
    """A layer used twice, a tied weight, a parameter without a use, a frozen layer, and a leading norm."""

    def __init__(self, classes, image_shape):
        super().__init__()
        self.first = nn.GroupNorm(1, image_shape[2])
        self.frozen = nn.Conv2d(image_shape[2], 6, 3, padding=1).requires_grad_(False)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.encode, self.decode = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.decode.weight = self.encode.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        x = self.frozen(self.first(x))
        x = self.twice(F.relu(self.twice(x))).mean((2, 3))
        return self.fc(self.decode(torch.tanh(self.encode(x))))


def dropped_map(classes, image_shape):
    """A linear layer behind a flattened map whose elements are dropped, as in AlexNet."""
    features = nn.Sequential(nn.Conv2d(image_shape[2], 4, 5, 4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(features, nn.Dropout(0.3), nn.Linear(4 * 7 * 7, classes))


class Dropping(nn.Module):
    def __init__(self, classes, image_shape):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(image_shape[2], 6, 3, stride=2), nn.Linear(6, classes)
        self.spatial, self.plain = nn.Dropout2d(0.3), nn.Dropout(0.4)

    def forward(self, x):
        x = self.spatial(self.plain(F.relu(self.conv(x))))
        return self.fc(F.dropout(x.mean((2, 3)), 0.2, training=self.training))


def frozen_small_maps(classes, image_shape):
    """A frozen convolution most of whose taps meet padding only."""
    frozen = nn.Conv2d(4, 6, 3, padding=1).requires_grad_(False)
    return nn.Sequential(
        nn.Conv2d(image_shape[2], 4, 3, 2, 1), nn.AdaptiveMaxPool2d(1), frozen, nn.ReLU(), nn.Flatten(),
        nn.Linear(6, classes),
    )  # fmt: skip


def whole_layers(classes, image_shape):
    """Layers of torch that are more than one operation, or have hooks."""
    doubled = nn.Linear(6, 6)
    doubled.register_forward_hook(lambda module, inputs, output: 2 * output)
    return nn.Sequential(
        nn.Conv2d(image_shape[2], 6, 3, 2, 1, padding_mode="circular"), nn.Identity(), nn.ReLU(), nn.Softmax2d(),
        nn.InstanceNorm2d(6), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Unflatten(1, (4, 6)), doubled, nn.ReLU(),
        nn.Flatten(), nn.Linear(24, classes),
    )  # fmt: skip


class Skipping(nn.Module):
    """Branches that torchvision's stochastic depth leaves out, for single images and for whole batches."""

    def __init__(self, classes, image_shape):
        super().__init__()
        ops = pytest.importorskip("torchvision").ops
        self.stem, self.branch = nn.Conv2d(image_shape[2], 6, 3, 4), nn.Conv2d(6, 6, 3, padding=1)
        self.row, self.batch = ops.StochasticDepth(0.4, "row"), ops.StochasticDepth(0.3, "batch")
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.row(F.silu(self.branch(x)))
        return self.fc((x + self.batch(torch.tanh(x))).mean((2, 3)))


def torchvision_resnet(classes, image_shape):
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.resnet18(num_classes=classes, norm_layer=lambda channels: nn.GroupNorm(2, channels))


class Unreached(nn.Module):
    """Layers whose parameters no backward pass reaches."""

    def __init__(self, classes, image_shape):
        super().__init__()
        self.body, self.head = nn.Linear(image_shape[0] * image_shape[1] * image_shape[2], 6), nn.Linear(6, classes)
        self.dropped, self.detached, self.gate = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.map, self.factor = nn.Conv2d(image_shape[2], 2, 3, stride=4), nn.Parameter(torch.ones(6))

    def forward(self, x):
        y = torch.tanh(self.body(x.flatten(1)))
        self.dropped(y) * self.factor
        y = y + self.detached(y).detach() + self.map(x).detach().mean((2, 3)).sum(1, keepdim=True)
        return self.head(y * F.one_hot(self.gate(y).argmax(1), 6).to(y.dtype))


MODELS = dict(
    resnet18=torchvision_resnet, vgg11=vgg11, lenet=LeNet, mlp=mlp, convnext=ConvNeXt, separable=separable, odd=Odd,
    in_place=InPlace, attention=Attention, shared=Shared, dropping=Dropping, dropped_map=dropped_map, skipping=Skipping,
    frozen_small_maps=frozen_small_maps, whole_layers=whole_layers, unreached=Unreached,
)  # fmt: skip
