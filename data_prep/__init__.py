"""Raw images in, one HDF5 file per silo out.

from data_prep import PrepareSettings, prepare, raw_available
manifest = prepare(PrepareSettings("digits", out="data/digits", clients=50, silos=4))
"""

from fedlada_mpi.data.prepare import prepare
from fedlada_mpi.data.settings import PrepareSettings
from fedlada_mpi.data.sources import raw_available

__all__ = ["PrepareSettings", "prepare", "raw_available"]
