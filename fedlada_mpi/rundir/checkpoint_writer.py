"""Checkpoints that a thread writes while the rounds go on.

    main thread    begin: copies | round 51 | round 52 | ...  | settle: checksums of all ranks, the folder's name
    thread                         server.h5, clients_0003.h5 |

The thread uses neither MPI, which need not allow that, nor the GPU, as a graph may be captured meanwhile. Where only
the root has files, its thread completes the checkpoint by itself. One that fails is not an error yet: the caller learns
of it by ``settle``, and saves again without a thread, with the error that this raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ..mpi import World
from ..support.errors import UserError
from . import checkpoint
from .checkpoint import Draft


class CheckpointWriter:
    """
    >>> writer.begin(draft, shared=True)    # collective
    >>> writer.is_writing                   # on this rank
    >>> writer.settle()                     # collective; whether the checkpoint is complete now
    """

    def __init__(self, world: World):
        self.world = world
        self.draft: Draft | None = None  # on all ranks or on none
        self.shared = False  # whether other ranks than the root have files
        self._thread: ThreadPoolExecutor | None = None
        self._written: Future[dict[str, int]] | None = None
        self._copies: dict[str, Tensor] = {}

    def begin(self, draft: Draft, shared: bool) -> None:
        """Start to write; collective, once the last one is settled.

        The vectors of the draft must not change any more, and its ``state`` is emptied once it is written.
        """
        self.world.on_root(draft.prepare)
        self.draft, self.shared = draft, shared
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._written = self._thread.submit(_write, draft, complete=draft.rank == 0 and not shared)

    def copies(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of these vectors, in the host's memory, where they are kept for the next time."""
        for name, vector in vectors.items():
            known = self._copies.get(name)
            if known is None or (known.shape, known.dtype) != (vector.shape, vector.dtype):
                self._copies[name] = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=vector.is_cuda)
            self._copies[name].copy_(vector, non_blocking=True)
        for device in {vector.device for vector in vectors.values() if vector.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._copies[name] for name in vectors}

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread is not done."""
        return self._written is not None and not self._written.done()

    def settle(self) -> bool:
        """Wait for the thread of every rank, and complete the checkpoint; False if it could not be. Collective."""
        draft, written = self.draft, self._written
        if draft is None or written is None:
            return True
        complete = True
        try:
            checksums = self.world.collectively(written.result)
            if self.shared:
                checkpoint.publish(self.world, draft, checksums)
        except UserError:
            draft.discard()
            complete = False
        self.draft = self._written = None
        return complete

    def close(self) -> None:
        """Wait for this rank's thread; a checkpoint that other ranks have a part in is given up. Not collective."""
        if self._thread is not None:
            self._thread.shutdown()
        if self.draft is not None:
            self.draft.discard()
        self.draft = self._written = self._thread = None
        self._copies = {}


def _write(draft: Draft, complete: bool) -> dict[str, int]:
    try:
        checksums = draft.write()
    finally:
        for clients in draft.state.values():
            clients.clear()
    if complete:
        draft.publish(checksums)
    return checksums
