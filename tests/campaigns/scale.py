"""How the parts of a run grow with the number of clients and of ranks, on this machine.

    python -m tests.campaigns.scale clients                   100 to 100,000 clients, one rank
    python -m tests.campaigns.scale ranks                     1 to 64 ranks
    python -m tests.campaigns.scale clients --numbers 100 1000 --json scale.json

Clients have four random images of 8x8 pixels each, ten of them train in a round, and SCAFFOLD keeps a vector for every
client that has trained. Ranks share 128 such clients; more than 16 ranks are forked from one process, which saves their
memory and their start. What other programs on the same cores take is left out: prepare,
start and report are seconds of the processor (of the rank that took most); of rounds, transport and checkpoints the
shortest counts. ``start_elapsed`` is what a clock shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fedlada_mpi.data.prepare import prepare
from fedlada_mpi.data.settings import PrepareSettings
from tests.helpers.fork_server import ForkServer
from tests.helpers.ranks import find_mpirun
from tests.helpers.repository import ROOT

CLIENTS, RANKS = (100, 1_000, 10_000, 100_000), (1, 2, 4, 8, 16, 32, 64)
PARTICIPANTS, ROUNDS, IMAGES = 10, 4, 4
FORKED = 16  # ranks; more are forked from one process, as each of its own would need more memory than there may be


def shards(folder: Path, clients: int) -> tuple[Path, float]:
    """Of random images, and the processor's seconds that their preparation took."""
    draw, count = np.random.default_rng(0), IMAGES * clients
    raw, out = folder / "raw.npz", folder / "shards"
    np.savez(
        raw,
        train_images=draw.integers(0, 256, (count, 8, 8, 1), np.uint8), train_labels=draw.integers(0, 10, count),
        test_images=draw.integers(0, 256, (500, 8, 8, 1), np.uint8), test_labels=draw.integers(0, 10, 500),
    )  # fmt: skip
    start = time.process_time()
    prepare(PrepareSettings(dataset="npz", out=out, raw=raw, clients=clients, silos=min(10, clients)))
    return out, time.process_time() - start


def timed(command: list[object], env: dict[str, str]) -> float:
    """Seconds of the processor."""
    start = os.times()
    done = subprocess.run([*map(str, command)], env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"status {done.returncode}: {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    end = os.times()
    return end.children_user + end.children_system - start.children_user - start.children_system


def environment() -> dict[str, str]:
    lines = (ROOT / "jobs" / "mpi.env").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {**os.environ, **settings, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}


def run(folder: Path, data: Path, clients: int, ranks: int, name: str, *more: object) -> dict[str, Any]:
    """One run's start, round, transport and checkpoint in seconds, and the memory of its ranks."""
    notes, out = folder / f"notes-{name}", folder / name
    notes.mkdir()
    launcher = [find_mpirun(), "-n", ranks] if ranks > 1 else []
    settings = ["--dataset", data, "--clients", clients, "--participation", PARTICIPANTS / clients, "--model", "cnn"]
    settings += ["--algorithm", "scaffold", "--local-steps", 2, "--rounds", ROUNDS, "--checkpoint-every", 1]
    settings += [] if "--eval-clients" in more else ["--eval-every", 0]
    with ExitStack() as forking:
        if ranks > FORKED:
            python = forking.enter_context(ForkServer(environment=environment())).python
        else:
            python = sys.executable
        program = [python, ROOT / "tests" / "helpers" / "measured_run.py"]
        begin = time.time()
        timed([*launcher, *program, notes, *settings, *more, "--out", out], environment())
    by_rank = [json.loads(path.read_text()) for path in notes.glob("rank-*.json")]
    records = [json.loads(line)["seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = max((out / "checkpoint").glob("round_*"))
    return {
        "start": max(seconds for rank in by_rank for _, seconds in rank["first"]),
        "start_elapsed": min(moment for rank in by_rank for moment, _ in rank["first"]) - begin,
        "round": min(record["total"] for record in records),
        "transport": min(record["bcast"] + record["reduce"] for record in records),
        "checkpoint": min(rank["checkpoint"] for rank in by_rank),
        "checkpoint_bytes": sum(path.stat().st_size for path in last.iterdir()),
        "peak_bytes": max(rank["peak_bytes"] for rank in by_rank),
        "own_bytes": max(rank["own_bytes"] for rank in by_rank),
    }


def by_clients(folder: Path, clients: int, repeats: int) -> dict[str, Any]:
    data, prepared = shards(folder, clients)
    rows = [run(folder, data, clients, 1, f"run-{i}") for i in range(repeats)]
    row = {"clients": clients, "prepare": prepared, **best(rows)}
    row["manifest_bytes"] = (data / "manifest.json").stat().st_size
    report = [sys.executable, "-m", "fedlada_mpi.report", folder / "run-0", "--out", folder / "report"]
    row["report"] = min(timed(report, environment()) for _ in range(repeats))
    # A round in which all clients' images are evaluated, client by client.
    row["round_with_evaluation"] = run(folder, data, clients, 1, "each", "--eval-clients", 1)["round"]
    return row


def by_ranks(folder: Path, ranks: int, repeats: int) -> dict[str, Any]:
    data, _ = shards(folder, 128)
    rows = [run(folder, data, 128, ranks, f"run-{i}") for i in range(repeats)]
    return {"ranks": ranks, **best(rows)}


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The least of every number."""
    return {name: min(row[name] for row in rows) for name in rows[0]}


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds with three digits, bytes in MB."""
    names = [name.replace("_bytes", ", MB").replace("_", " ") for name in rows[0]]
    lines = ["| " + " | ".join(names) + " |", "| " + " | ".join("---:" for _ in names) + " |"]
    for row in rows:
        cells = [f"{v / 1e6:,.3g}" if n.endswith("bytes") else f"{v:,.3g}" if isinstance(v, float) else f"{v:,}"
                 for n, v in row.items()]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("clients", "ranks"))
    parser.add_argument("--numbers", type=int, nargs="*", help="of clients or ranks [all]")
    parser.add_argument("--repeats", type=int, default=1, help="runs, of which the least numbers count [1]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    measure, numbers = (by_clients, CLIENTS) if options.what == "clients" else (by_ranks, RANKS)
    rows = []
    for number in options.numbers or numbers:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), number, options.repeats))
            print(rows[-1], flush=True)
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}\n\n{table(rows)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
