"""Several runs one after another on the same ranks: starting Python and MPI costs more than they do.

    mpirun -n 4 python several_runs.py FOLDER '[["--rounds", "2"], ...]'

Writes to FOLDER/RANK.json the status of each and what it printed. ``NUMBERED=2,1,3`` in the environment: clients of
shards that all ranks read draw by the numbers that they have where silos of so many have a directory each.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

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

done = []
for line in json.loads(sys.argv[2]):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        done.append({"status": main(line)})
    done[-1] |= {"out": out.getvalue(), "err": err.getvalue()}
Path(sys.argv[1], f"{os.environ['OMPI_COMM_WORLD_RANK']}.json").write_text(json.dumps(done))
