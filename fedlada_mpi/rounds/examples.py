"""The examples of a rank: on its device, or streamed to it from the memory of the host or from files.

A step reads its batch from a ``Window``, by an index that is known before the round. On the device that is all of the
examples; of streamed ones it is two slots, each with the batches of a few steps in their order: while the device
computes on one, the host fills the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..models.form import Stored, each, nbytes

Which: TypeAlias = "slice | np.ndarray"


class Window(Protocol):
    """What the steps of a round read."""

    inputs: Stored
    targets: Tensor

    def index(self, steps: int, clients: int) -> Tensor | None:
        """Where the batches of the steps are, [steps, clients, width]; None: where they are among all examples."""

    def blocks(self, index: Tensor, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The steps from ``first`` to ``last``, as many at a time as are there; ``index`` is that of the whole round.

        The steps that are yielded have to be begun before the next are asked for.
        """


class Examples(Protocol):
    """Inputs and targets of examples by their number."""

    resident: bool  # whether they are on the device, at one place for the whole run

    def __len__(self) -> int: ...

    def take(self, which: Which) -> tuple[Stored, Tensor]:
        """Inputs and targets, on the device."""

    def targets(self, which: Which) -> Tensor: ...

    @property
    def labels(self) -> Tensor | None:
        """The targets of all, on the device, where they are classes."""

    @property
    def nbytes(self) -> int:
        """Of the device's memory."""

    def window_bytes(self, width: int) -> int:
        """Of the device's memory, for one client's batches of so many examples."""

    def window(self, clients: int, width: int) -> Window:
        """For the batches of at most so many clients."""


@dataclass
class Resident:
    """Examples on the device; of them all, a step takes those of its batch."""

    inputs: Stored
    all_targets: Tensor
    resident = True

    def __len__(self) -> int:
        return len(self.all_targets)

    def take(self, which: Which) -> tuple[Stored, Tensor]:
        rows = self._rows(which)
        return each(self.inputs, lambda values: values[rows]), self.all_targets[rows]

    def targets(self, which: Which) -> Tensor:
        return self.all_targets[self._rows(which)]

    def _rows(self, which: Which) -> slice | Tensor:
        return which if isinstance(which, slice) else torch.from_numpy(which).to(self.all_targets.device)

    @property
    def labels(self) -> Tensor | None:
        return self.all_targets if are_labels(self.all_targets) else None

    @property
    def nbytes(self) -> int:
        return nbytes(self.inputs) + self.all_targets.nbytes

    def window_bytes(self, width: int) -> int:
        return 0

    def window(self, clients: int, width: int) -> Window:
        return WholeWindow(self.inputs, self.all_targets)


def are_labels(targets: Tensor) -> bool:
    return targets.ndim == 1 and targets.dtype == torch.int64


@dataclass
class WholeWindow:
    """All examples, where they are."""

    inputs: Stored
    targets: Tensor

    def index(self, steps: int, clients: int) -> Tensor | None:
        return None

    def blocks(self, index: Tensor, first: int, last: int) -> Iterator[tuple[int, int]]:
        yield first, last


class Source(Protocol):
    """Examples in the host's memory or in files."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> tuple[Stored, Tensor]:
        """Inputs and targets in the types that a device gets, on the host."""

    def targets(self, rows: np.ndarray) -> Tensor: ...


SLOT_BYTES = 64 * 2**20  # of a window's slot, unless a single step takes more
SLOT_STEPS = 8  # at most: the first block of a round is waited for


class Streamed:
    """Examples that pass through the device's memory."""

    resident = False

    def __init__(self, source: Source, device: torch.device):
        self.source, self.device = source, device
        self.example = source.take(np.zeros(1, np.int64) if len(source) else np.zeros(0, np.int64))
        targets = self.example[1]
        self._labels = source.targets(np.arange(len(source))).to(device) if are_labels(targets) else None

    def __len__(self) -> int:
        return len(self.source)

    def take(self, which: Which) -> tuple[Stored, Tensor]:
        inputs, targets = self.source.take(self._rows(which))
        return each(inputs, self._moved), self._moved(targets)

    def targets(self, which: Which) -> Tensor:
        return self._moved(self.source.targets(self._rows(which)))

    def _rows(self, which: Which) -> np.ndarray:
        return np.arange(*which.indices(len(self))) if isinstance(which, slice) else which

    def _moved(self, values: Tensor) -> Tensor:
        return self.pinned(values).to(self.device, non_blocking=True)

    def pinned(self, values: Tensor) -> Tensor:
        """In memory from which a GPU reads while the host goes on; torch keeps it until it was read."""
        return values.pin_memory() if self.device.type == "cuda" else values

    @property
    def labels(self) -> Tensor | None:
        return self._labels

    @property
    def nbytes(self) -> int:
        return 0 if self._labels is None else self._labels.nbytes

    @property
    def row_bytes(self) -> int:
        inputs, targets = self.example
        return (nbytes(inputs) + targets.nbytes) // max(1, len(targets))

    def window_bytes(self, width: int) -> int:
        return 2 * min(SLOT_STEPS * width * self.row_bytes, max(SLOT_BYTES, width * self.row_bytes))

    def window(self, clients: int, width: int) -> Window:
        return StreamedWindow(self, clients, width)


class StreamedWindow:
    """Two slots, which take turns."""

    def __init__(self, examples: Streamed, clients: int, width: int):
        self.examples, self.clients, self.width = examples, clients, width
        self.batch = clients * width
        self.steps = max(1, min(SLOT_STEPS, SLOT_BYTES // max(1, self.batch * examples.row_bytes)))
        rows, device = 2 * self.steps * self.batch, examples.device

        def room(example: Tensor) -> Tensor:
            return torch.zeros(rows, *example.shape[1:], dtype=example.dtype, device=device)

        self.inputs, self.targets = each(examples.example[0], room), room(examples.example[1])
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.filled: list[torch.cuda.Event | None] = [None, None]
        self.read: list[torch.cuda.Event | None] = [None, None]

    def index(self, steps: int, clients: int) -> Tensor | None:
        """Batches of fewer clients than there is room for lie side by side, too."""
        place = torch.arange(steps) % (2 * self.steps) * self.batch
        return place[:, None, None] + torch.arange(clients * self.width).view(clients, self.width)

    def blocks(self, index: Tensor, first: int, last: int) -> Iterator[tuple[int, int]]:
        while first < last:
            block = first // self.steps
            if first == 0:
                self._begin()
                self._fill(index, 0)
            if first % self.steps == 0:
                self._wait_for(block)
            end = min(last, (block + 1) * self.steps)
            yield first, end
            if first % self.steps == 0 and (block + 1) * self.steps < len(index):
                self._fill(index, block + 1)  # while the device computes
            first = end

    def _begin(self) -> None:
        """Both slots have been read once what is under way has ended."""
        if self.stream is not None:
            self.read = [torch.cuda.current_stream(self.examples.device).record_event()] * 2

    def _fill(self, index: Tensor, block: int) -> None:
        """Put a block's batches into its slot, once the steps before have read what is there."""
        slot, wanted = block % 2, index[block * self.steps : (block + 1) * self.steps]
        inputs, targets = self.examples.source.take(wanted.reshape(-1).numpy())
        rows = (len(wanted), wanted[0].numel())

        def copy(values: Tensor, room: Tensor) -> Tensor:
            there = room.view(2, self.steps, self.batch, *room.shape[1:])[slot, : rows[0], : rows[1]]
            return there.copy_(self.examples.pinned(values).view(*rows, *values.shape[1:]), non_blocking=True)

        if self.stream is None:
            each(inputs, copy, self.inputs)
            copy(targets, self.targets)
            return
        if (read := self.read[slot]) is not None:
            self.stream.wait_event(read)
        with torch.cuda.stream(self.stream):
            each(inputs, copy, self.inputs)
            copy(targets, self.targets)
        self.filled[slot] = self.stream.record_event()

    def _wait_for(self, block: int) -> None:
        """Let the steps that come now wait until their slot is filled, and whoever fills the other until it is read."""
        if self.stream is None:
            return
        current = torch.cuda.current_stream(self.examples.device)
        self.read[1 - block % 2] = current.record_event()
        filled = self.filled[block % 2]
        assert filled is not None
        current.wait_event(filled)
