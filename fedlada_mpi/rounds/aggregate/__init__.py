"""How the participants' contributions become the means of the server's step (``--sums``, ``--robust``)."""

from __future__ import annotations

import torch

from ...algorithms import Algorithm
from ...mpi import World
from ...mpi.transport import Transport
from ...settings import Config
from .base import Aggregation, Collector, Part, Sent
from .buffered import WeightedSums
from .grid import GRIDS
from .plain import PlainSums, RankSums
from .private import PrivatePlainSums, PrivateSums
from .robust import ClippedSums, Median, TrimmedMean

__all__ = ["Aggregation", "Collector", "Part", "PrivateSums", "RankSums", "Sent", "create", "wire_type"]

ROBUST: dict[str, type[Aggregation]] = {"clip": ClippedSums, "median": Median, "trimmed": TrimmedMean}
SUMS: dict[str, type[Aggregation]] = {"fast": PlainSums, "exact": WeightedSums}


def create(
    world: World, config: Config, algorithm: Algorithm, transport: Transport, dtype: torch.dtype
) -> Aggregation:  # fmt: skip
    """The aggregation that the settings ask for, of vectors of ``dtype``."""
    kind = SUMS[config.sums] if config.robust == "none" else ROBUST[config.robust]
    if config.dp != "none":
        kind = PrivatePlainSums
    return kind(world, config, algorithm, transport, dtype)


def wire_type(config: Config, dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` are reduced in."""
    return GRIDS[dtype].integer if config.sums == "exact" else dtype
