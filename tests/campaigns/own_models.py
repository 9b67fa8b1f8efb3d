"""Random models of users': right ones must train to one result on every path, wrong ones be refused in one line.

    python tests/campaigns/own_models.py --trials 200 --seed 3

A right model is a chain of random layers. It trains on stacked layers, on the generic engine, one client at a time, and
with a resume in between; the four results must agree up to rounding. A wrong model is a right one with a single error,
and must be refused before anything is written. Prints a row of a table for each kind; ends with 1
if one was not taken so.
"""

# ruff: noqa: E402  (the path comes first)
from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import torch
import torch.nn.functional as F
from torch import nn
from training_runs import CLASSES, make_data

import fedlada_mpi
from fedlada_mpi.support.errors import UserError

ROUNDS = 4
CLOSE = 1e-7  # of the norm of a result in double precision
Layer = Callable[[int], tuple[nn.Module, int]]  # from a number of channels


class Residual(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int):
        super().__init__()
        self.squeeze = nn.Linear(channels, channels)

    def forward(self, x):
        return x * torch.sigmoid(self.squeeze(x.mean((2, 3))))[:, :, None, None]


class Attention(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)
        self.register_buffer("scale", torch.tensor(channels**-0.5))

    def forward(self, x):
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) * self.scale).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(x.shape)


class Branch(nn.Module):
    """What torch.fx cannot trace."""

    def __init__(self, channels: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x):
        return x * self.scale if self.scale.sum() > 0 else x - self.scale


class Bounded(nn.Module):
    """A max-norm without a change of the parameter."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return F.conv2d(x, self.conv.weight.renorm(2, 0, 0.5), self.conv.bias)


class InPlace(nn.Module):
    def forward(self, x):
        y = x.clone()
        y.mul_(0.5).add_(0.1)
        return y


class Reversal(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 0.5 * g


class Damped(nn.Module):
    def forward(self, x):
        return Reversal.apply(x)


def frozen(c: int) -> tuple[nn.Module, int]:
    return nn.Conv2d(c, c, 3, padding=1).requires_grad_(False), c


def hooked(c: int) -> tuple[nn.Module, int]:
    layer = nn.Conv2d(c, c, 1)
    layer.register_forward_hook(lambda module, inputs, output: output.clamp(-2, 2))
    return layer, c


def hooked_gradient(c: int) -> tuple[nn.Module, int]:
    layer = nn.Conv2d(c, c, 1)
    layer.register_full_backward_pre_hook(lambda module, g: (0.5 * g[0],))
    return layer, c


def twice(c: int) -> tuple[nn.Module, int]:
    layer = nn.Conv2d(c, c, 3, padding=1)
    return nn.Sequential(layer, nn.Tanh(), layer), c


def tied(c: int) -> tuple[nn.Module, int]:
    one, two = nn.Conv2d(c, c, 1, bias=False), nn.Conv2d(c, c, 1, bias=False)
    two.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), two), c


LAYERS: dict[str, Layer] = {
    "conv": lambda c: (nn.Conv2d(c, 6, 3, padding=1), 6),
    "grouped": lambda c: (nn.Conv2d(c, 2 * c, 3, padding=1, groups=c), 2 * c),
    "1x1": lambda c: (nn.Conv2d(c, 4, 1, bias=False), 4),
    "group norm": lambda c: (nn.GroupNorm(1, c), c),
    "instance norm": lambda c: (nn.InstanceNorm2d(c, affine=True), c),
    "relu": lambda c: (nn.ReLU(), c),
    "gelu": lambda c: (nn.GELU(), c),
    "silu": lambda c: (nn.SiLU(), c),
    "softmax": lambda c: (nn.Softmax2d(), c),
    "dropout": lambda c: (nn.Dropout(0.3), c),
    "dropout2d": lambda c: (nn.Dropout2d(0.3), c),
    "max pool": lambda c: (nn.MaxPool2d(3, 1, 1), c),
    "average pool": lambda c: (nn.AvgPool2d(3, 1, 1), c),
    "residual": lambda c: (Residual(nn.Conv2d(c, c, 3, padding=1)), c),
    "gate": lambda c: (Gate(c), c),
    "attention": lambda c: (Attention(c), c),
    "branch": lambda c: (Branch(c), c),
    "bounded": lambda c: (Bounded(c), c),
    "in place": lambda c: (InPlace(), c),
    "own gradient": lambda c: (Damped(), c),
    "frozen": frozen,
    "hook": hooked,
    "gradient hook": hooked_gradient,
    "used twice": twice,
    "tied": tied,
    "lazy": lambda c: (nn.LazyConv2d(5, 1), 5),
}


def chain(names: list[str]) -> nn.Sequential:
    layers, channels = [], 3
    for name in names:
        layer, channels = LAYERS[name](channels)
        layers.append(layer)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, CLASSES))


class Wrong(nn.Module):
    def __init__(self, net: nn.Module, forward: Callable):
        super().__init__()
        self.net, self.change, self.count = net, forward, 0
        self.register_buffer("seen", torch.zeros(()))

    @property
    def weight(self) -> torch.Tensor:
        return self.net[-1].weight

    def forward(self, x):
        return self.change(self, self.net, x)


def changes_weights(self, net, x):
    with torch.no_grad():
        self.weight.copy_(self.weight.renorm(2, 0, 0.3))
    return net(x)


def changes_large_weights(self, net, x):
    if self.weight.norm() > 20:
        self.weight.data.mul_(0.5)
    return net(x)


def clamps_in_evaluation(self, net, x):
    if not self.training:
        self.weight.data.clamp_(-5, 5)
    return net(x)


def counts(self, net, x):
    self.count += 1
    return net(x) if self.count < 1000 else -net(x)


def counts_in_a_buffer(self, net, x):
    self.seen += 1
    return net(x)


def toggles(self, net, x):
    self.weight.requires_grad_(False)
    return net(x)


def detaches(self, net, x):
    return net(x).detach()


def evaluates(self, net, x):
    self.eval()
    return net(x)


def numpy_noise(self, net, x):
    return net(x) + random.random() * 1e-1


FORWARDS = {
    "weights changed": changes_weights,
    "large weights changed": changes_large_weights,
    "weights clamped in evaluation": clamps_in_evaluation,
    "a counter": counts,
    "a buffer that counts": counts_in_a_buffer,
    "requires_grad in forward": toggles,
    "detached": detaches,
    "eval() in forward": evaluates,
    "Python's random": numpy_noise,
    "times the batch size": lambda self, net, x: net(x) * len(x),
    "mixed from three images on": lambda self, net, x: net(x if len(x) < 3 else x - x.mean(0)),
    "shuffled": lambda self, net, x: net(x + x[torch.rand(len(x)).argsort()] if self.training else x),
    "squeezed": lambda self, net, x: net(x).squeeze(),
    "dropout in evaluation": lambda self, net, x: net(F.dropout(x, 0.5)),
    "dropout across images": lambda self, net, x: F.dropout(net(x).t(), 0.5, self.training).t(),
    "a cast": lambda self, net, x: net(x.half()),
    "not finite": lambda self, net, x: net(x).log() * float("nan"),
    "an integer": lambda self, net, x: net(x).long(),
    "a pair": lambda self, net, x: (net(x), x),
    "too many outputs": lambda self, net, x: torch.cat((net(x), net(x)), 1),
    "an exception": lambda self, net, x: net(x) + self.nothing,
}


def parameter_hook(net: nn.Sequential) -> nn.Module:
    net[-1].weight.register_hook(lambda g: 2 * g)
    return net


def complex_parameter(net: nn.Sequential) -> nn.Module:
    model = Wrong(net, lambda self, net, x: net(x) * self.phase.abs())
    model.phase = nn.Parameter(torch.ones(CLASSES, dtype=torch.complex64))
    return model


def shared_memory(net: nn.Sequential) -> nn.Module:
    model = Wrong(net, lambda self, net, x: net(x) + self.extra)
    model.extra = nn.Parameter(net[-1].weight.detach()[0, :CLASSES])
    return model


def view(net: nn.Sequential) -> nn.Module:
    model = Wrong(net, lambda self, net, x: F.linear(net[:-1](x), self.rows.view(CLASSES, -1)))
    model.rows = net[-1].weight.view(-1)
    return model


def batch_norm(net: nn.Sequential) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(3), *net)


def batch_statistics(net: nn.Sequential) -> nn.Module:
    return nn.Sequential(*net[:-1], nn.BatchNorm1d(net[-1].in_features, track_running_stats=False), net[-1])


ERRORS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    **{name: lambda net, forward=forward: Wrong(net, forward) for name, forward in FORWARDS.items()},
    "hook on a parameter": parameter_hook,
    "complex parameter": complex_parameter,
    "shared memory": shared_memory,
    "view made before": view,
    "BatchNorm": batch_norm,
    "statistics of the batch": batch_statistics,
}


class Campaign:
    def __init__(self, work: Path, seed: int):
        self.work, self.random = work, random.Random(seed)
        self.data = make_data(work / "data", [3, 7, 1, 5, 4])
        self.taken: Counter[tuple[str, str]] = Counter()
        self.failures = 0

    def train(self, build: Callable, **settings: object) -> torch.Tensor:
        values = dict(
            dataset=str(self.data.shards), partition="natural", clients=5, algorithm="fedavg", rounds=ROUNDS,
            participation=0.8, local_epochs=1, batch_size=4, precision="fp64", device="cpu", seed=1, lr=0.05,
            checkpoint_every=2, eval_every=2, out=str(self.work / "run"), quiet=True, model=build,
        )  # fmt: skip
        fedlada_mpi.train(**{**values, **settings})
        state = torch.load(self.work / "run" / "model.pt", weights_only=True)
        return torch.cat([value.double().flatten() for value in state.values()])

    def right(self, names: list[str]) -> str:
        def build(classes, image_shape):
            return chain(names)

        whole = self.train(build, engine="auto")
        others = {}
        for name, settings in {"generic": dict(engine="generic"), "in turns": dict(max_clients_at_once=1)}.items():
            self.clear()
            others[name] = self.train(build, **settings)
        self.clear()
        self.train(build, rounds=2)
        others["resumed"] = self.train(build, resume=True)
        for name, result in others.items():
            if not (whole - result).norm() <= CLOSE * whole.norm():
                return f"{name} differs by {(whole - result).norm() / whole.norm():.1e}"
        return "one result"

    def clear(self) -> None:
        shutil.rmtree(self.work / "run", ignore_errors=True)

    def trial(self) -> None:
        names = [self.random.choice(list(LAYERS)) for _ in range(self.random.randint(1, 5))]
        error = self.random.choice(list(ERRORS)) if self.random.random() < 0.5 else ""
        kind, what = ("wrong", f"{error} in {names}") if error else ("right", str(names))
        expected = "refused in one line" if error else "one result"
        try:
            if error:
                self.train(lambda classes, image_shape: ERRORS[error](chain(names)))
                outcome = "accepted"
            else:
                outcome = self.right(names)
        except UserError as refusal:
            lines = str(refusal).splitlines()
            outcome = "refused in one line" if len(lines) == 1 and str(refusal).startswith("model") else str(refusal)
            if (self.work / "run").exists():
                outcome = f"files were written before: {refusal}"
            if not error:
                outcome = f"refused: {refusal}"
        except Exception as other:
            outcome = f"{type(other).__name__}: {other}"
        self.clear()
        good = outcome == expected
        self.taken[kind, outcome if good else "otherwise"] += 1
        if not good:
            self.failures += 1
            print(f"FAILED {what}: {outcome[:600]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), options.seed)
        for _ in range(options.trials):
            campaign.trial()
    for (kind, outcome), count in sorted(campaign.taken.items()):
        print(f"| {kind} models | {count} | {outcome} |")
    return int(campaign.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
