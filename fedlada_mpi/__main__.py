"""python -m fedlada_mpi: the commands of the package."""

from __future__ import annotations

import sys

from .support.errors import shortened
from .support.suggestions import did_you_mean
from .support.version import __version__

COMMANDS = {
    "fedlada_mpi.run": "train a model, alone, with -n on several ranks, or under srun and mpirun",
    "fedlada_mpi.grid": "list and run the runs of an experiment",
    "fedlada_mpi.tune": "choose settings on validation data",
    "fedlada_mpi.report": "compare runs: tables, figures, one HTML page",
    "fedlada_mpi.predict": "the class of image files, by the model of a run",
    "fedlada_mpi.doctor": "what works on this machine, and how to fix the rest",
    "fedlada_mpi.bench": "time a round on this machine",
    "fedlada_mpi.keys": "keys by which silos know each other, for --secure",
    "fedlada_mpi.scaling": "a round's time on many nodes, from a model of it",
    "data_prep": "prepare the shards of a data set: a known one, a folder of images, arrays",
    "data_prep.inspect": "verify shards, and show who has what",
}


def main() -> int:
    given = sys.argv[1:]
    width = max(map(len, COMMANDS))
    print(f"fedlada_mpi {__version__}: federated learning over MPI\n")
    print(*(f"  python -m {name:<{width}}  {what}" for name, what in COMMANDS.items()), sep="\n")
    print("\nEach has --help. The first run needs nothing: python -m fedlada_mpi.run trains the embedded digits.")
    if not given or given[0] in ("-h", "--help"):
        return 0
    meant = did_you_mean(f"fedlada_mpi.{given[0]}", COMMANDS)
    print(f"error: got {shortened(given[0])}, expected one of the commands above{meant}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
