"""Several runs one after another on the same ranks: starting Python and MPI costs more than they do.

    mpirun -n 4 python several_runs.py '[["--rounds", "2"], ...]'

Prints on each rank the status of each. ``NUMBERED=2,1,3`` in the environment: clients of shards that all ranks read draw
by the numbers that they have where they belong to silos of so many with a directory each.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from fedlada_mpi.run import main

if counts := [int(word) for word in os.environ.get("NUMBERED", "").split(",") if word]:
    from fedlada_mpi.session import run_data

    of_clients = run_data.SharedShards.of_clients

    def numbered(self, world, owners, loading):
        data = of_clients(self, world, owners, loading)
        numbers = [(silo << 20) + place for silo, count in enumerate(counts) for place in range(count)]
        data.numbers = np.array(numbers, np.int64)[data.client_ids]
        return data

    run_data.SharedShards.of_clients = numbered

statuses = [main(line) for line in json.loads(sys.argv[1])]
os.write(1, f"statuses {json.dumps(statuses)}\n".encode())
