"""Checkpoints as a run writes them."""

from __future__ import annotations

from pathlib import Path

from fedlada_mpi.algorithms import Vectors
from fedlada_mpi.mpi import World
from fedlada_mpi.rundir import checkpoint
from fedlada_mpi.settings import Config


def save_checkpoint(
    world: World, out: Path, t: int, config: Config, s: Vectors, state: checkpoint.State,
    digests: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """The whole checkpoint after round ``t``; collective."""
    checkpoint.save(world, checkpoint.Draft(out, t, world.rank, config, vars(s), state, digests))
