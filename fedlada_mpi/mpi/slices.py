"""A function of all participants' values, one coordinate at a time, such as a median: every rank computes a slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .world import World

VALUES = 1 << 22  # that a rank sends or receives at a time, so that buffers do not grow with the vectors


def over_participants(
    world: World, rows: Tensor, counts: Sequence[int], function: Callable[[Tensor], Tensor], result: Tensor
) -> None:
    """Apply ``function``, [S, n] -> [n], to the values of all S participants, into the root's ``result`` [d].

    ``rows`` [own, d]: the values of this rank's participants; ``counts``: how many participants each rank has.
    ``function`` gets its rows in the order of the ranks, so it must not depend on their order. Collective.
    """
    total, size, device = sum(counts), rows.shape[1], rows.device
    own, kind = counts[world.rank], np.dtype(str(rows.dtype).removeprefix("torch."))
    step = max(world.size, VALUES // max(counts))
    world.barrier()
    for first in range(0, size, step):
        piece = rows[:, first : first + step].cpu().numpy()
        length = piece.shape[1]
        bounds = np.arange(world.size + 1) * length // world.size
        lengths = np.diff(bounds)
        mine = int(lengths[world.rank])
        sent = np.concatenate([piece[:, a:b].ravel() for a, b in pairwise(bounds)])
        values = np.empty((total, mine), kind)
        with world.wait_limit:
            world.comm.Alltoallv((sent, own * lengths), (values, np.multiply(counts, mine)))
        computed = function(torch.from_numpy(values).to(device)).cpu().numpy()
        whole = np.empty(length if world.rank == 0 else 0, kind)
        with world.wait_limit:
            world.comm.Gatherv(computed, (whole, lengths))
        if world.rank == 0:
            result[first : first + step].copy_(torch.from_numpy(whole))
        # A participant's values move to the other ranks, each its slice; the results move to the root, but for its own.
        moved = sum(count * (length - int(n)) for count, n in zip(counts, lengths, strict=True))
        world.bytes_moved += (moved + length - int(lengths[0])) * kind.itemsize
