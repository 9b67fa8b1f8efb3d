"""FedLADA and its baselines, cross-silo, over MPI."""

import os

__version__ = "0.1.0"

# Before torch loads OpenMP: on a machine that others use too, threads that spin while they wait slow each other down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
