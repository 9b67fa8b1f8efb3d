"""The two workloads, as every framework gets them, and the record that a driver leaves of its run.

``moving``  10 clients, all take part; 11,181,642 float32 parameters (torchvision's ResNet-18 with GroupNorm(2) and ten
            classes). Client c adds (c + 1) * 1e-6 to each: the mean is right only if every client counts once.
``digits``  20 clients with 75 of the embedded 8x8 digits each, 4 of them a round; a CNN of 6,090 parameters, one epoch
            of SGD with rate 0.1 in batches of 10, so 8 steps. Accuracy on the 297 digits that nobody has.

A driver is called as ``python with_NAME.py WORKLOAD WAY --rounds N --record FILE``; ``WAY`` is one of its own words. It
makes a ``Job``, calls ``round_ended`` whenever the server has the new mean, and ``finish`` with the final model.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frameworks import DIGITS, MOVING
from torch import Tensor, nn

CLIENTS = {MOVING: 10, DIGITS: 20}
PARTICIPANTS = {MOVING: 10, DIGITS: 4}
PARAMETERS = {MOVING: 11_181_642, DIGITS: 6_090}
IMAGES, BATCH, RATE = 75, 10, 0.1  # images of a client; SGD's batches and rate
STEP = 1e-6
EMBEDDED = Path(__file__).resolve().parents[3] / "fedlada_mpi" / "data" / "sources" / "digits.npz"


def resnet() -> nn.Module:
    from torchvision.models import resnet18  # here, as importing it takes seconds

    torch.manual_seed(0)
    return resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(2, channels))


class CNN(nn.Module):
    """For 8x8 images; every instance starts from the same values."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


@functools.cache
def pixels(part: str) -> tuple[np.ndarray, np.ndarray]:
    """The digits for ``train`` or ``test``, uint8 [n, 8, 8, 1], and their labels; those of a client are neighbours."""
    with np.load(EMBEDDED) as arrays:
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"].astype(np.int64)
    order = np.random.RandomState(0).permutation(len(labels))
    return images[order], labels[order]


@functools.cache
def examples(part: str) -> tuple[Tensor, Tensor]:
    """The same, between 0 and 1 [n, 1, 8, 8]."""
    images, labels = pixels(part)
    return torch.from_numpy(images).float().div(255).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


def client_data(client: int) -> tuple[Tensor, Tensor]:
    images, labels = examples("train")
    own = slice(client * IMAGES, (client + 1) * IMAGES)
    return images[own], labels[own]


def client_set(client: int) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(*client_data(client))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    images, labels = examples("test")
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


@torch.no_grad()
def add(model: nn.Module, client: int) -> None:
    """The local work of ``moving``."""
    for parameter in model.parameters():
        parameter.add_((client + 1) * STEP)


def train(model: nn.Module, client: int) -> None:
    """The local work of ``digits``, where a framework has no trainer of its own."""
    images, labels = client_data(client)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for batch in torch.randperm(len(images)).split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@torch.no_grad()
def load_flat(model: nn.Module, vector: Tensor) -> None:
    for parameter, values in _pieces(model, vector):
        parameter.copy_(values)


@torch.no_grad()
def add_to_flat(vector: Tensor, model: nn.Module) -> None:
    """In place, as new memory of this size costs more than the addition."""
    for parameter, values in _pieces(model, vector):
        values.add_(parameter)


def _pieces(model: nn.Module, vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every parameter, and its place in a flat vector."""
    first = 0
    for parameter in model.parameters():
        yield parameter, vector[first : first + parameter.numel()].view_as(parameter)
        first += parameter.numel()


def error_of_mean(x: Tensor, start: Tensor, rounds: int) -> float:
    """How far ``x`` is from ``start`` plus the mean step of every round, as a multiple of what rounding explains.

    Ten float32 numbers near x are added up and divided, so up to ten roundings of x, 1e-7 each, are allowed per round.
    """
    mean = STEP * (CLIENTS[MOVING] + 1) / 2
    x, start = x.double(), start.double()
    allowed = rounds * (1e-8 + 1.2e-6 * x.abs())
    return float(((x - start - rounds * mean).abs() / allowed).max())


@dataclass
class Job:
    """A workload, how a framework is to run it, and what has been measured."""

    workload: str
    way: str
    rounds: int
    record: Path
    ended: list[float] = field(default_factory=list)  # when each round ended

    @property
    def clients(self) -> int:
        return CLIENTS[self.workload]

    @property
    def participants(self) -> int:
        return PARTICIPANTS[self.workload]

    def model(self) -> nn.Module:
        """At its start."""
        return resnet() if self.workload == MOVING else CNN()

    def work(self, model: nn.Module, client: int) -> None:
        (add if self.workload == MOVING else train)(model, client)

    def round_ended(self, when: float | None = None) -> None:
        self.ended.append(time.perf_counter() if when is None else when)
        self._write({})

    def finish(self, model: nn.Module) -> None:
        """Check the model that the rounds have given."""
        if self.workload == MOVING:
            self._write({"error": error_of_mean(flat(model), flat(self.model()), len(self.ended))})
        else:
            self._write({"accuracy": accuracy(model)})

    def _write(self, check: dict[str, Any]) -> None:
        """Also of a run that is cut short."""
        seconds = np.diff(self.ended).tolist()
        written = self.record.with_suffix(".part")
        written.write_text(json.dumps({"rounds": len(self.ended), "seconds": seconds, **check}))
        written.replace(self.record)


def job(argv: list[str] | None = None) -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=(MOVING, DIGITS))
    parser.add_argument("way")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--record", type=Path, required=True)
    return Job(**vars(parser.parse_args(argv)))
