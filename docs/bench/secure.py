"""What ``--secure`` costs in whole rounds, beside ``--sums exact`` and the same grid without masks.

    mpirun -n 4 python docs/bench/secure.py                                        the digits' network
    mpirun -n 11 python docs/bench/secure.py --model resnet18 --image 32           ResNet-18 on random images
    mpirun -n 11 python docs/bench/secure.py --model resnet18 --image 32 --device cuda      ranks that share a GPU

Runs take turns, so that other work on the machine slows down all of them alike; each leaves out its first round.
Printed are medians over all rounds, on the root. Without the package cryptography there are no masks, and the rest is
measured.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from mpi4py import MPI

from data_prep import PrepareSettings, prepare
from fedlada_mpi.privacy.library import require_cryptography
from fedlada_mpi.run import main as run
from fedlada_mpi.support.errors import UserError

EXACT = "--sums exact"
KINDS = {EXACT: EXACT, "the grid": "--secure --secure-neighbours 0", "masked": "--secure --secure-neighbours all"}
PHASES = ("train", "reduce", "total")


def kinds() -> dict[str, str]:
    try:
        require_cryptography()
    except UserError:
        return {name: words for name, words in KINDS.items() if name != "masked"}
    return KINDS


def data(folder: Path, side: int, clients: int) -> Path:
    """Random images of so many pixels a side, a few for every client; the digits where none are asked for."""
    shards = folder / "shards"
    if not side:
        prepare(PrepareSettings("digits", shards, clients=clients, silos=clients))
        return shards
    random, owners = np.random.default_rng(0), np.repeat(np.arange(clients), 20)
    arrays = {
        f"{part}_images": random.integers(0, 256, (count, side, side, 3), np.uint8)
        for part, count in (("train", len(owners)), ("test", 20))
    }
    labels = {"train_labels": np.arange(len(owners)) % 10, "test_labels": np.arange(20) % 10}
    np.savez(folder / "raw.npz", train_clients=owners, **arrays, **labels)
    settings = dict(raw=str(folder / "raw.npz"), clients=clients, silos=clients, partition="natural")
    prepare(PrepareSettings("npz", shards, **settings))
    return shards


def seconds(out: Path) -> list[dict[str, float]]:
    """Of all rounds but the first."""
    lines = (out / "metrics.jsonl").read_text().splitlines()[1:]
    return [{phase: json.loads(line)["seconds"][phase] for phase in PHASES} for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--algorithm", default="fedlada")
    parser.add_argument("--image", type=int, default=0, help="pixels a side of random images; 0: the digits")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    folder = Path(world.bcast(tempfile.mkdtemp(prefix="secure-bench-") if world.rank == 0 else None))
    shards = world.bcast(data(folder, options.image, options.clients) if world.rank == 0 else None)
    words = ["--dataset", str(shards), "--model", options.model, "--algorithm", options.algorithm, "--participation"]
    words += ["1", "--local-steps", str(options.local_steps), "--batch-size", str(options.batch_size), "--rounds"]
    words += [str(options.rounds), "--eval-every", "0", "--checkpoint-every", "0", "--device", options.device]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds()}
    for number in range(options.repeats):
        for i, (name, more) in enumerate(kinds().items()):
            out = folder / f"{number}-{i}"
            with redirect_stdout(io.StringIO()):
                status = run([*words, *more.split(), "--out", str(out)])
            if status:
                return status
            if world.rank == 0:
                found[name] += seconds(out)
    if world.rank == 0:
        print(f"{options.model}, {options.algorithm}, {world.size} ranks, {options.device}: milliseconds of a round")
        middle = {
            name: {p: statistics.median(each[p] for each in all_) for p in PHASES} for name, all_ in found.items()
        }
        for name, phases in middle.items():
            ratio = phases["total"] / middle[EXACT]["total"]
            times = "  ".join(f"{phase} {1e3 * phases[phase]:9.2f}" for phase in PHASES)
            print(f"{name:<12}  {times}  {ratio:.3f} of {EXACT}, {len(found[name])} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
