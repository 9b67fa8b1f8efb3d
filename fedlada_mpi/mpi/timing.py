"""Times of collectives for the benchmark, and MPI's own Bcast and Reduce to compare a transport with."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from torch import Tensor

from .world import World


def plain_bcast(world: World, vector: Tensor) -> None:
    with world.wait_limit:
        world.comm.Bcast(vector.numpy())


def plain_reduce(world: World, vector: Tensor) -> None:
    with world.wait_limit:
        if world.rank == 0:
            world.comm.Reduce(MPI.IN_PLACE, vector.numpy())
        else:
            world.comm.Reduce(vector.numpy(), None)


def slowest_rank(world: World, action: Callable[[], None], repeats: int) -> float:
    """The median of ``slowest_seconds``."""
    return float(np.median(slowest_seconds(world, action, repeats)))


def slowest_seconds(world: World, action: Callable[[], None], repeats: int, warm_up: int = 2) -> list[float]:
    """The slowest rank's seconds in every repetition after the ``warm_up``; all ranks start together."""
    seconds = np.empty(repeats)
    for i in range(-warm_up, repeats):
        world.barrier()  # lets slower ranks have the cores
        with world.wait_limit:
            world.comm.Barrier()  # ends on all ranks at nearly the same time
        start = time.perf_counter()
        action()
        if i >= 0:
            seconds[i] = time.perf_counter() - start
    with world.wait_limit:
        world.comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return seconds.tolist()
