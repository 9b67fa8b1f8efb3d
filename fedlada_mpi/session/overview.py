"""What a run is, in figures: for the banner, and for the record of where it was computed."""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
import torch

from .. import mpi
from ..mpi.plan import cuda_aware
from ..rounds.costs import Costs, RankMemory
from ..rounds.device import arithmetic, device_name, precision_notes
from ..rundir import provenance
from ..support.rng import fixed_number
from ..support.version import __version__
from .assemble import Session
from .console import Overview


def environment(session: Session) -> dict[str, Any]:
    """What the run runs on."""
    return {
        "fedlada_mpi": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi": mpi.implementation(),
        "ranks": session.world.size,
        "device": device_name(session.device),
        "cpu": provenance.cpu_model(),
        "threads": torch.get_num_threads(),
        "transport": session.silo.transport.kind,
        "host": platform.node(),
        "command": sys.argv,
    }


def overview(session: Session, memory: np.ndarray, sums_changed: str) -> Overview:
    """For the banner; ``memory`` has a row for every rank's ``RankMemory``."""
    config, owners = session.config, session.owners
    trains = zip(map(len, owners.clients_of), owners.only_serves, strict=True)
    return Overview(
        config,
        session.manifest,
        session.algorithm,
        session.start,
        parameters=session.network.layout.numel,
        arithmetic=arithmetic(config.precision, session.device),
        engine=session.silo.trainer.engine.description,
        on_cpu=session.device.type == "cpu",
        ranks_on_node=session.world.node.size,
        clients_per_rank=[count for count, only_serves in trains if count or not only_serves],
        cuda_aware=cuda_aware(),
        environment=environment(session),
        sums_changed=sums_changed,
        model_notes=[*session.network.notes, *precision_notes(config.precision, session.device)],
        costs=costs(session, memory),
    )


def costs(session: Session, memory: np.ndarray) -> Costs:
    a, manifest, transport = session.algorithm, session.manifest, session.silo.transport
    rank_of = np.zeros(manifest.clients, np.int64)
    for rank, clients in enumerate(session.owners.clients_of):
        rank_of[clients] = rank
    vector_bytes = session.network.layout.numel * session.dtype.itemsize
    participants = fixed_number(manifest.clients, session.config.participation)
    down = (len(a.down) - 1) * transport.bytes_per_vector + transport.bytes_rounded
    bytes_mpi = down + session.silo.aggregation.bytes_moved(participants)
    ranks = [RankMemory(*map(int, row)) for row in memory]
    return Costs.of(session.config, a, vector_bytes, bytes_mpi, rank_of, session.start, ranks)
