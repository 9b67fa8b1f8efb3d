"""The data of a run on this rank's device: its clients' examples, and on the root what belongs to no client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..data.manifest import TEST_FILE, VALIDATION_FILE, Manifest
from ..data.rows import Inputs
from ..data.shards import Shard, padded_inputs, read_clients, read_test
from ..models.form import Stored, as_stored
from ..rounds.batches import LocalData, Normalise, Normaliser, on_device, tensor_of
from ..tasks import Task, check_targets


@dataclass
class Loading:
    """Reads shards for a task; floating-point numbers become ``dtype``."""

    manifest: Manifest
    task: Task
    device: torch.device
    dtype: torch.dtype

    def of_clients(self, clients: Sequence[int] | np.ndarray) -> LocalData:
        """The clients' examples, with those that they have to test on; the files have been checked."""
        shard = read_clients(self.manifest, clients, verify=False)
        data = self._local(shard)
        if shard.test is not None:
            data.test = self._local(shard.test)
        return data

    def of_nobody(self) -> dict[str, tuple[Stored, Tensor]]:
        """Inputs and targets of the test set and of the validation set, as far as there are such."""
        files = {"test": TEST_FILE, "val": VALIDATION_FILE}
        found = {part: read_test(self.manifest, name=name) for part, name in files.items()}
        return {part: self._moved(*rows) for part, rows in found.items() if rows is not None}

    def _local(self, shard: Shard) -> LocalData:
        m = self.manifest
        normalise: Normalise = as_stored
        if m.image:
            normalise = Normaliser(*(torch.tensor(v, dtype=self.dtype, device=self.device) for v in (m.mean, m.std)))
        inputs, targets = self._moved(shard.inputs, shard.targets)
        return LocalData(inputs, targets, shard.client_ids, shard.offsets[:-1], np.diff(shard.offsets), normalise)

    def _moved(self, inputs: Inputs, targets: np.ndarray) -> tuple[Stored, Tensor]:
        """On the device, in the types that a run computes with; images stay as they are."""
        m = self.manifest
        arrays = padded_inputs(m.arrays, inputs)
        check_targets(self.task, targets, str(m.root))
        floats = None if m.image else self.dtype
        return on_device(arrays, self.device, floats), tensor_of(targets, self.device, self.dtype)
