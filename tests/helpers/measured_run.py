"""A run that writes the moment of its first round, its checkpoints' seconds and each rank's memory to a folder.

python tests/helpers/measured_run.py FOLDER --rounds 6 ...
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path


def main(argv: list[str]) -> None:
    from fedlada_mpi.rounds import server, silo
    from fedlada_mpi.run import main as run

    first, saved, save, round_ = [], [], silo.Silo.save, server.Server.round

    def timed(*arguments, **options):
        start = time.perf_counter()
        save(*arguments, **options)
        saved.append(time.perf_counter() - start)

    def noted(self, t):
        first.append((time.time(), time.process_time()))
        return round_(self, t)

    silo.Silo.save, server.Server.round = timed, noted
    status = run(argv[1:])
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss = next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    about = {"first": first[:1], "checkpoint": min(saved), "own_bytes": pss, "peak_bytes": peak}
    Path(argv[0], f"rank-{time.time_ns()}.json").write_text(json.dumps(about))
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
