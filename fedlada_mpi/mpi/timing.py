"""Times of collectives for the benchmark, and the library's own Bcast and Reduce to compare with."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from torch import Tensor

from .world import World


def plain_bcast(world: World, vector: Tensor) -> None:
    world.comm.Bcast(vector.numpy())


def plain_reduce(world: World, vector: Tensor) -> None:
    if world.rank == 0:
        world.comm.Reduce(MPI.IN_PLACE, vector.numpy())
    else:
        world.comm.Reduce(vector.numpy(), None)


def slowest_rank(world: World, action: Callable[[], None], repeats: int) -> float:
    """Median over repetitions of the slowest rank's seconds for a collective, after two that are not counted."""
    seconds = np.empty(repeats)
    for i in range(repeats + 2):
        world.comm.Barrier()
        start = time.perf_counter()
        action()
        seconds[i - 2] = time.perf_counter() - start
    world.comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return float(np.median(seconds))
