"""FedLADA and its baselines, cross-silo, over MPI."""

__version__ = "0.1.0"
