"""The data of a run, for this rank's device: its clients' examples, and on the root what belongs to no client.

It is on the device where it takes no more than half of what is free there; else it is streamed, from the host's memory
where that has room for it, or from the files. ``--data-on`` decides otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..data.manifest import TEST_FILE, VALIDATION_FILE, Manifest, Stored
from ..data.rows import Inputs, joined_inputs, take
from ..data.shards import Shard, map_clients, padded_inputs, read_clients, read_test
from ..models.form import Stored as Tensors
from ..models.form import as_stored
from ..rounds.batches import LocalData, Normalise, Normaliser, on_device, tensor_of
from ..rounds.examples import Examples, Resident, Streamed
from ..support.errors import UserError
from ..support.processes import available_memory
from ..tasks import Task, check_targets

SHARE = 0.5  # of the memory that is free, for data: clients' models and activations have the rest

Part = tuple[Inputs, np.ndarray]  # inputs and targets as they are stored


@dataclass
class Loading:
    """Reads shards for a task; floating-point numbers become ``dtype``."""

    manifest: Manifest
    task: Task
    device: torch.device
    dtype: torch.dtype
    on: str = "auto"
    ranks_on_node: int = 1
    places: set[str] = field(default_factory=set)  # where data has been put

    def of_clients(self, clients: Sequence[int] | np.ndarray) -> LocalData:
        """The clients' examples, with those that they have to test on; the files have been checked."""
        ids, m = np.asarray(clients, np.int64), self.manifest
        place = self._place(int(self._rows[ids].sum()), self._stored_bytes(ids))
        files = place == "disk"
        shards = map_clients(m, ids, verify=False) if files else [read_clients(m, ids, verify=False)]
        data = self._local(shards, ids, m.sizes, place)
        if m.own_tests:
            own = [shard.test for shard in shards if shard.test is not None]
            data.test = self._local(own, ids, m.test_sizes, place)
        return data

    def of_nobody(self) -> dict[str, Examples]:
        """The test set and the validation set, as far as there are such."""
        found: dict[str, Examples] = {}
        for part, name in {"test": TEST_FILE, "val": VALIDATION_FILE}.items():
            if name in self.manifest.files:
                place = self._place(self.manifest.rows(name), self.manifest.files[name]["bytes"])
                rows = read_test(self.manifest, name=name, mapped=place == "disk")
                assert rows is not None
                found[part] = self._examples([rows], place)
        return found

    def _local(self, shards: list[Shard], ids: np.ndarray, sizes: np.ndarray, place: str) -> LocalData:
        m = self.manifest
        normalise: Normalise = as_stored
        if m.image:
            normalise = Normaliser(*(torch.tensor(v, dtype=self.dtype, device=self.device) for v in (m.mean, m.std)))
        examples = self._examples([(shard.inputs, shard.targets) for shard in shards], place)
        mine = sizes[ids]
        return LocalData(examples, ids, np.cumsum(mine) - mine, mine, normalise)

    def _examples(self, parts: list[Part], place: str) -> Examples:
        for _, targets in parts:
            check_targets(self.task, targets, str(self.manifest.root))
        if place != "device":
            return Streamed(StoredRows(self, parts), self.device)
        try:
            return Resident(*self.converted(*parts[0], self.device))
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                "--data-on device: the data does not fit in the GPU's memory; --data-on host streams it to the GPU"
            ) from None

    def converted(self, inputs: Inputs, targets: np.ndarray, device: torch.device) -> tuple[Tensors, Tensor]:
        """On a device, in the types that a run computes with; images stay as they are."""
        arrays = padded_inputs(self.manifest.arrays, inputs)
        return on_device(arrays, device, self._floats), tensor_of(targets, device, self.dtype)

    @property
    def _rows(self) -> np.ndarray:
        """Of every client, to train and to test on."""
        m = self.manifest
        return m.sizes + m.test_sizes if m.own_tests else m.sizes

    @property
    def _floats(self) -> torch.dtype | None:
        return None if self.manifest.image else self.dtype

    def _place(self, rows: int, stored_bytes: float) -> str:
        """Where so many rows are kept, which take ``stored_bytes`` in the files: device, host or disk."""
        place = self.on if self.on != "auto" else self._fitting(rows * self._row_bytes(), stored_bytes)
        if self.device.type == "cpu" and place == "host":
            place = "device"  # the same memory
        if rows:
            self.places.add(place)
        return place

    def _fitting(self, device_bytes: float, host_bytes: float) -> str:
        host = SHARE * available_memory() / self.ranks_on_node
        if self.device.type == "cpu":
            return "device" if device_bytes <= host else "disk"
        sharing = math.ceil(self.ranks_on_node / torch.cuda.device_count())
        if device_bytes <= SHARE * torch.cuda.mem_get_info(self.device)[0] / sharing:
            return "device"
        return "host" if host_bytes <= host else "disk"

    def _row_bytes(self) -> int:
        """Of the device's memory."""

        def size(stored: Stored, floats: torch.dtype | None) -> int:
            kind = np.dtype("float32" if stored.mean else stored.dtype)
            each = kind.itemsize
            if floats is not None and kind.kind != "b":
                each = floats.itemsize if kind.kind == "f" else 8
            return math.prod(stored.shape) * each

        inputs = sum(size(stored, self._floats) for stored in self.manifest.arrays.values())
        return inputs + size(self.manifest.targets, self.dtype)

    def _stored_bytes(self, clients: np.ndarray) -> float:
        """What the clients have of the files."""
        m, rows = self.manifest, self._rows
        total = 0.0
        for silo in np.unique(m.places[0][clients]):
            theirs = m.client_ids[silo]
            share = rows[np.intersect1d(clients, theirs)].sum() / max(1, rows[theirs].sum())
            total += m.files[m.file(silo)]["bytes"] * share
        return total


class StoredRows:
    """Examples in parts, each in memory or in a file, as they are stored; those that are taken are converted."""

    def __init__(self, loading: Loading, parts: list[Part]):
        self.loading, self.parts = loading, parts
        self.ends = np.cumsum([len(targets) for _, targets in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take(self, rows: np.ndarray) -> tuple[Tensors, Tensor]:
        which, order = self._parts(rows)
        taken = [take(self.parts[part][0], within) for part, within in which]
        inputs = taken[0] if len(taken) == 1 else take(joined_inputs(taken), order)
        return self.loading.converted(inputs, self._targets(which, order), torch.device("cpu"))

    def targets(self, rows: np.ndarray) -> Tensor:
        return tensor_of(self._targets(*self._parts(rows)), torch.device("cpu"), self.loading.dtype)

    def _targets(self, which: list[tuple[int, np.ndarray]], order: np.ndarray) -> np.ndarray:
        taken = [self.parts[part][1][within] for part, within in which]
        return taken[0] if len(taken) == 1 else np.concatenate(taken)[order]

    def _parts(self, rows: np.ndarray) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
        """The parts that have the rows, with their rows there; and, one after another, where each row is in these."""
        part_of = np.searchsorted(self.ends, rows, side="right")
        starts = self.ends - np.diff(self.ends, prepend=0)
        found = [(int(part), rows[part_of == part] - starts[part]) for part in np.unique(part_of)]
        order = np.empty(len(rows), np.int64)
        order[np.argsort(part_of, kind="stable")] = np.arange(len(rows))
        return found or [(0, rows)], order
