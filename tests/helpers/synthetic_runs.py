"""Runs for tests of the report: in memory, and directories as a training would write them, from a formula.

python tests/helpers/synthetic_runs.py runs/synthetic main --rounds 1500
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fedlada_mpi import experiments
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.analysis import groups, load
from fedlada_mpi.rundir.columns import CLASSIFICATION, Columns

SPEED = {
    "fedavg": 1.0,
    "fedprox": 1.05,
    "scaffold": 1.5,
    "fedcm": 1.7,
    "fedadam": 0.8,
    "localadam": 1.6,
    "fedlada": 2.2,
}
VECTORS = {"fedavg": (1, 1), "fedprox": (1, 1), "fedadam": (1, 1), "fedcm": (2, 1), "fedadam_amended": (2, 1)}
TOP = {"digits": 0.97, "cifar10": 0.86, "cifar100": 0.53, "tinyimagenet": 0.42}
PARAMETERS = {"digits": 10_000, "cifar10": 11_181_642, "cifar100": 11_227_812, "tinyimagenet": 11_279_112}


def records(settings: dict, rounds: int, ranks: int = 11) -> list[dict]:
    noise = np.random.default_rng(settings["seed"])
    method, dataset = settings["algorithm"], settings["dataset"]
    down, up = VECTORS.get(method, (2, 2))
    d, sampled = PARAMETERS[dataset], round(settings["clients"] * settings["participation"])
    best = 0.3 if dataset == "digits" else 0.1
    penalty = abs(math.log10(max(settings["alpha"], 0.01) / best)) if method == "fedlada" else 0.0
    speed, top = SPEED.get(method, 0.7) / (1 + penalty), TOP[dataset] * (1 - 0.04 * penalty)
    found = []
    for t in range(1, rounds + 1):
        progress = 1 - math.exp(-speed * t / 120)
        wobble = float(noise.normal(0, 0.004))
        wait = noise.uniform(0.0, 0.1, ranks)
        train = 0.5 - wait
        train[0] = 0.0
        found.append(
            {
                "round": t,
                "lr": settings["lr"] * settings["lr_decay"] ** (t - 1),
                "participants": sorted(noise.choice(settings["clients"], sampled, replace=False).tolist()),
                "local_loss": 2.3 * math.exp(-speed * t / 150) + 0.01,
                "train_loss": 2.3 * math.exp(-speed * t / 200) + 0.02 + abs(wobble),
                "train_acc": min(1.0, 1 - 0.9 * math.exp(-speed * t / 220)),
                "test_loss": 2.3 - 1.6 * progress,
                "test_acc": round(min(1.0, max(0.0, top * progress + wobble)), 4),
                "consistency": 3 * settings.get("alpha", 0.1) * math.exp(-t / 800) + abs(wobble),
                "bytes_down": sampled * down * 4 * d,
                "bytes_up": sampled * up * 4 * d,
                "bytes_mpi": (ranks - 1) * (down + up) * 4 * d,
                "paper_units": sampled * (1 if down == 1 else 2),
                "seconds": {"bcast": 0.04, "train": 0.5, "reduce": 0.14, "server": 0.02, "eval": 0.3, "total": 1.0},
                "seconds_by_rank": {"train": train.round(4).tolist(), "wait": wait.round(4).tolist()},
            }
        )
    return found


def write_run(directory: Path, given: dict, rounds: int, status: str | None = "finished") -> Path:
    """A run directory with so many rounds; without a status it is one that is going on."""
    settings = resolve({}, {**given, "out": str(directory)}).config.record()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))
    lines = [json.dumps(r) for r in records(settings, rounds)]
    (directory / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if status:
        summary = {"status": status, "rounds": rounds, "seconds": float(rounds), "environment": {"world_size": 11}}
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def run(
    test, *, seed=0, status="finished", rounds=None, columns: Columns = CLASSIFICATION, **changes
) -> load.RecordedRun:
    """A run in memory with these values of its objective on the test data, one participant, vectors of ten bytes."""
    settings = {**groups._preset("cifar10", changes.get("algorithm", "fedavg")), "seed": seed, **changes}
    n = len(test)
    settings["rounds"] = n if rounds is None else rounds
    values = {name: np.full(n, np.nan) for name in (*columns.numbers, *columns.optional, "participants")}
    values |= {f"seconds_{p}": np.full(n, 0.5) for p in load.ALL_PHASES}
    values |= {columns.objective.of("test"): np.array(test, float), "participants": np.full(n, 2.0)}
    values |= {"paper_units": np.full(n, 4.0), "bytes_down": np.full(n, 20.0), "bytes_up": np.full(n, 10.0)}
    return load.RecordedRun(Path(f"run{seed}"), settings, np.arange(1, n + 1), values, status=status, columns=columns)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table that a report has written as CSV."""
    with open(path) as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=0, help="so many seeds instead of the experiment's own")
    arguments = parser.parse_args()
    changes = {"seed": list(range(arguments.seeds))} if arguments.seeds else {}
    for name in arguments.experiments:
        for run in experiments.load(name, str(arguments.out), changes).runs:
            write_run(run.directory, {**run.given, "rounds": arguments.rounds}, arguments.rounds)


if __name__ == "__main__":
    main()
