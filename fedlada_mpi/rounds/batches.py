"""A round's mini-batches: which examples each client sees at each step, and how images are augmented.

The whole round is planned on the host as small integer arrays and copied to the device once; a step then
gathers its batch from the inputs on the device, without the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..models.form import Stored
from ..settings import Config
from ..support import rng
from .examples import Examples


@dataclass
class Plan:
    """Arrays [K, C, B]; a client's rows end where its own steps do (its weights are zero from there on).

    Batches are padded with the client's own first example: no other's is ever among its numbers.
    """

    index: Tensor  # int64, into the rank's images
    weight: Tensor  # 1/n of the batch's n images, 0 where the batch is padded
    flip: Tensor  # bool
    down: Tensor  # int32, rows and
    right: Tensor  # columns that the crop moves over the image
    keys: Tensor  # int64 [K, C], of the random numbers that a user's layers draw


class Batch:
    """A step of a plan, [C, B]: its fields by name, and the labels of its examples; a field is a view when it is read.

    On a CPU, views that nobody reads would take as long as small products.
    """

    index: Tensor
    labels: Tensor  # int64
    weight: Tensor
    flip: Tensor
    down: Tensor
    right: Tensor
    keys: Tensor

    def __init__(self, words: Tensor, count: int, fields: Mapping[str, Field]):
        self._words, self._count, self._fields = words, count, fields

    def __getattr__(self, name: str) -> Tensor:
        if name not in self._fields:
            raise AttributeError(name)
        kind, elements, first, length = self._fields[name]
        values = self._words[..., first : first + length].view(kind)[..., : self._count * elements]
        found = values if name == "keys" else values.unflatten(-1, (self._count, elements))
        self.__dict__[name] = found
        return found

    def at(self, step: int) -> Batch:
        """One step of a batch of several."""
        return _Step(self, step)


class _Step(Batch):
    """A step whose fields are taken from those of all steps: one view each."""

    def __init__(self, steps: Batch, step: int):
        self._steps, self._step = steps, step

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        found = self.__dict__[name] = getattr(self._steps, name)[self._step]
        return found


Field: TypeAlias = "tuple[torch.dtype, int, int, int]"  # type, elements of a client, first word, words


class PlanBuffer:
    """A plan on the device, for any plan of at most ``steps`` steps and ``clients`` clients.

    All of a step is adjacent in memory, in words of eight bytes, so one operation reads a step whose number is known
    only on the device.
    """

    def __init__(self, steps: int, clients: int, width: int, dtype: torch.dtype, device: torch.device):
        whole, half = torch.int64, torch.int32
        each = dict(index=whole, labels=whole, weight=dtype, keys=whole, down=half, right=half, flip=torch.bool)
        self.steps = steps
        self.fields: dict[str, Field] = {}
        first = 0
        for name, kind in each.items():
            elements = 1 if name == "keys" else width
            words = -(-clients * elements * kind.itemsize // 8)
            self.fields[name] = (kind, elements, first, words)
            first += words
        self.words = torch.zeros(steps, first, dtype=torch.int64, device=device)
        # From where a GPU gets a plan in one piece, and has it before the results of its steps are known.
        self.host = torch.zeros(steps, first, dtype=torch.int64, pin_memory=True) if self.words.is_cuda else self.words
        self.whole: dict[int, Batch] = {}  # by number of clients, the fields of all steps

    def load(self, plan: Plan, labels: Tensor | None, index: Tensor | None = None) -> None:
        """A new plan; ``labels`` are those of the rank's examples, where a target is a class.

        ``index``: where steps find the examples, if not where they are among all of the rank.
        """
        steps, count = plan.keys.shape
        host, buffer = (self._of(words[:steps], count) for words in (self.host, self.words))
        for name, values in vars(plan).items():
            getattr(host, name).copy_(values)
        if self.host is not self.words:
            self.words[:steps].copy_(self.host[:steps], non_blocking=True)
        if labels is not None:
            buffer.labels.copy_(labels[buffer.index])
        if index is not None:
            buffer.index.copy_(index)

    def at(self, step: int | Tensor, count: int) -> Batch:
        """Step ``step`` of the first ``count`` clients; a step on the device is read there."""
        if not isinstance(step, int):
            return self._of(self.words.index_select(0, step)[0], count)
        if count not in self.whole:
            self.whole[count] = self._of(self.words, count)
        return self.whole[count].at(step)

    def _of(self, words: Tensor, count: int) -> Batch:
        """The fields of the first ``count`` clients in ``words`` [..., words]; views."""
        return Batch(words, count, self.fields)


def local_steps(config: Config, sizes: np.ndarray) -> np.ndarray:
    """K_i of clients with ``sizes`` images."""
    if config.local_steps:
        return np.full(len(sizes), config.local_steps, dtype=np.int64)
    batch = np.where(config.batch_size, config.batch_size, sizes)
    return config.local_epochs * -(-sizes // np.maximum(batch, 1))


def plan(
    config: Config, t: int, clients: np.ndarray, starts: np.ndarray, sizes: np.ndarray, width: int, dtype: torch.dtype
) -> Plan:
    """The plan of ``clients`` (their images are starts[i] .. starts[i] + sizes[i]) with batches of ``width``."""
    steps = local_steps(config, sizes)
    shape = (int(steps.max()), len(clients), width)
    index, weight = np.zeros(shape, np.int64), np.zeros(shape, np.float64)
    flip, down, right = np.zeros(shape, bool), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    keys = np.zeros(shape[:2], np.int64)
    for c, (client, start, n, count) in enumerate(
        zip(clients.tolist(), starts.tolist(), sizes.tolist(), steps.tolist(), strict=True)
    ):
        batch = min(config.batch_size or n, n)
        per_epoch = -(-n // batch)
        epochs = -(-count // per_epoch)
        order = np.full((epochs, per_epoch * batch), -1)
        order[:, :n] = rng.permutations(n, epochs, config.seed, t, client)
        order = order.reshape(-1, batch)[:count]
        there = order >= 0
        index[:, c] = start
        index[:count, c, :batch] += np.maximum(order, 0)
        weight[:count, c, :batch] = there / there.sum(1, keepdims=True)
        keys[:count, c] = rng.bits(count, config.seed, rng.LAYERS, t, client).view(np.int64)
        if config.augment == "paper":
            # As many draws as the client's own batches hold, whatever the width of this rank's plan.
            drawn = rng.bits(count * batch, config.seed, rng.AUGMENT, t, client).reshape(count, batch)
            flip[:count, c, :batch] = drawn & 1 if config.flip else 0
            moves = drawn & 2 if config.crop == "half" else np.full_like(drawn, config.crop == "always")
            pad = config.crop_padding
            side = np.uint64(2 * pad + 1)
            down[:count, c, :batch] = np.where(moves, (drawn >> np.uint64(2)) % (1 << 20) % side, pad)
            right[:count, c, :batch] = np.where(moves, (drawn >> np.uint64(22)) % (1 << 20) % side, pad)
            down[:count, c, :batch] -= pad
            right[:count, c, :batch] -= pad
    return Plan(
        torch.from_numpy(index),
        torch.from_numpy(weight).to(dtype),
        torch.from_numpy(flip),
        torch.from_numpy(down),
        torch.from_numpy(right),
        torch.from_numpy(keys),
    )


def all_batches(
    config: Config, t: int, clients: np.ndarray, starts: np.ndarray, sizes: np.ndarray, width: int, dtype: torch.dtype
) -> Plan:
    """Every image of ``clients`` once, as it is; a weight is 1/n_i, so that gradients add up to the full one."""
    steps = -(-int(sizes.max()) // width)
    shape = (len(clients), steps * width)
    index, weight = np.zeros(shape, np.int64), np.zeros(shape)
    keys = np.zeros((steps, len(clients)), np.int64)
    for c, (client, start, n) in enumerate(zip(clients.tolist(), starts.tolist(), sizes.tolist(), strict=True)):
        index[c], weight[c, :n] = start, 1 / n
        index[c, :n] += np.arange(n)
        keys[:, c] = rng.bits(steps, config.seed, rng.FULL_GRADIENT, t, client).view(np.int64)

    def by_step(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.reshape(len(clients), steps, width).swapaxes(0, 1).copy())

    still = np.zeros(shape, np.int32)
    return Plan(
        by_step(index),
        by_step(weight).to(dtype),
        by_step(still.astype(bool)),
        by_step(still),
        by_step(still),
        torch.from_numpy(keys),
    )


def by_counts(batches: Plan, counts: Tensor) -> Plan:
    """Every image once, for a loss of sums and counts: a batch weighs what it has of the client's ``counts``."""
    there = batches.weight > 0
    mine = (counts.cpu()[batches.index] * there).sum(2)
    total = mine.sum(0)
    share = mine / total.masked_fill(total == 0, 1)
    each = there * (share / there.sum(2).clamp(min=1)).unsqueeze(2)
    return replace(batches, weight=each.to(batches.weight.dtype))


@dataclass
class Normaliser:
    """Pixels to (pixel / 255 - mean) / std, per channel."""

    mean: Tensor
    std: Tensor

    def __post_init__(self) -> None:
        self._expanded: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Of images [..., rows, columns, channels]."""
        wide = dtype if dtype == torch.float64 else torch.float32
        if images.is_cuda:
            # A tensor, not a number: for a number a GPU multiplies by the rounded inverse, and the last bit differs.
            white = torch.full_like(self.mean, 255, dtype=wide)
            return ((images.to(wide) / white - self.mean.to(wide)) / self.std.to(wide)).to(dtype)
        white, mean, std = self._pixels(images.shape[-3:], wide)
        pixels = images.reshape(-1, len(mean)).to(wide, copy=True)
        return pixels.div_(white).sub_(mean).div_(std).to(dtype).view(images.shape)

    def _pixels(self, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """White, mean and deviation of every element of an image: a CPU is slow where it repeats a few channels."""
        if (shape, dtype) not in self._expanded:
            values = (torch.full_like(self.mean, 255), self.mean, self.std)
            white, mean, std = (value.to(dtype).expand(shape).flatten() for value in values)
            self._expanded[shape, dtype] = white, mean, std
        return self._expanded[shape, dtype]


Normalise: TypeAlias = Callable[[Tensor, torch.dtype], Tensor]


def gather(images: Tensor, batch: Plan | Batch, normalise: Normalise, dtype: torch.dtype, augment: bool) -> Tensor:
    """The batch [C, B, H, W, ch]: flipped, then cropped out of the zero-padded image, in normalised space."""
    if not augment:
        if images.is_cuda:
            return normalise(images[batch.index], dtype)
        # Whole images are copied, not single pixels.
        picked = images.index_select(0, batch.index.flatten())
        return normalise(picked, dtype).view(*batch.index.shape, *images.shape[1:])
    n, rows, columns, channels = images.shape
    row = torch.arange(rows, device=images.device) + batch.down.unsqueeze(-1)
    column = torch.arange(columns, device=images.device) + batch.right.unsqueeze(-1)
    inside = ((row >= 0) & (row < rows)).unsqueeze(-1) & ((column >= 0) & (column < columns)).unsqueeze(-2)
    column = torch.where(batch.flip.unsqueeze(-1), columns - 1 - column, column)
    row, column = row.clamp(0, rows - 1), column.clamp(0, columns - 1)
    pixel = (batch.index.unsqueeze(-1) * rows + row).unsqueeze(-1) * columns + column.unsqueeze(-2)
    picked = images.view(n * rows * columns, channels)[pixel]
    return normalise(picked, dtype) * inside.unsqueeze(-1)


Arrays: TypeAlias = "np.ndarray | dict[str, np.ndarray]"


def on_device(arrays: Arrays, device: torch.device, floats: torch.dtype | None) -> Stored:
    """One array, or several by name, as ``tensor_of`` has them; ``floats`` None: of the types that they are."""
    if isinstance(arrays, np.ndarray):
        return tensor_of(arrays, device, floats)
    return {name: tensor_of(array, device, floats) for name, array in arrays.items()}


def tensor_of(array: np.ndarray, device: torch.device, floats: torch.dtype | None) -> Tensor:
    """Floating-point numbers as ``floats``, integers as int64, and truth values as they are."""
    if floats is None or array.dtype == bool:
        return torch.from_numpy(array).to(device)
    if array.dtype.kind == "f":
        return torch.from_numpy(array).to(device, floats)
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)


@dataclass
class LocalData:
    """A rank's examples, and where those of each of its clients are."""

    examples: Examples  # inputs of images are uint8 [n, H, W, ch], targets that are classes int64 [n]
    client_ids: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    normalise: Normalise
    largest: int = 0  # examples of the largest client of any rank, where batches have one shape on all of them
    test: LocalData | None = None  # test examples of the same clients, where these have their own
    # What clients' draws depend on: numbers that are theirs whoever else takes part; by default ``client_ids``.
    numbers: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.numbers = self.client_ids if self.numbers is None else self.numbers

    @property
    def nbytes(self) -> int:
        return self.examples.nbytes + (self.test.nbytes if self.test is not None else 0)
