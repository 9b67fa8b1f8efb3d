"""How the participants' contributions become the means of the server's step (``--sums``, ``--robust``,
``--secure``)."""

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
from .private import PrivatePlainSums, PrivateSecureSums, PrivateSums
from .robust import ClippedSums, Median, TrimmedMean
from .secure import Secure, SecureSums, most_participants

__all__ = [
    "Aggregation",
    "Collector",
    "Part",
    "PrivateSecureSums",
    "PrivateSums",
    "RankSums",
    "Secure",
    "SecureSums",
    "Sent",
    "create",
    "most_participants",
    "wire_type",
]

ROBUST: dict[str, type[Aggregation]] = {"clip": ClippedSums, "median": Median, "trimmed": TrimmedMean}
SUMS: dict[str, type[Aggregation]] = {"fast": PlainSums, "exact": WeightedSums}


def create(
    world: World,
    config: Config,
    algorithm: Algorithm,
    transport: Transport,
    dtype: torch.dtype,
    secure: Secure | None = None,
) -> Aggregation:
    """The aggregation that the settings ask for, of vectors of ``dtype``."""
    if secure is not None:
        masked = PrivateSecureSums if config.dp != "none" else SecureSums
        return masked(world, config, algorithm, transport, dtype, secure)
    kind = SUMS[config.sums] if config.robust == "none" else ROBUST[config.robust]
    if config.dp != "none":
        kind = PrivatePlainSums
    return kind(world, config, algorithm, transport, dtype)


def wire_type(config: Config, dtype: torch.dtype) -> torch.dtype:
    """What vectors of ``dtype`` move in; masked sums have a transport of their own."""
    return GRIDS[dtype].integer if config.sums == "exact" and not config.secure else dtype
