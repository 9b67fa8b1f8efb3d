"""Runs that lose ranks under ``mpirun --with-ft ulfm``: each must end, with the result of a run with these departures.

    python tests/campaigns/departures.py                                  200 silos, 50 servers, 20 stopped, 20 nodes
    python tests/campaigns/departures.py --silo 10 --server 5 --stop 0 --node 0 --seed 3

Every run has 4 to 8 ranks, a random method, victim and moment. It is compared with a run of one process in which the
clients of the lost ranks take no part from the same round on, or with ``--adopt`` with an undisturbed one: ``--sums
exact`` gives the same bits on any ranks. Prints one row per kind, and ends with 1 if a run differs or hangs.
"""

# ruff: noqa: E402  (the path comes first)
from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "nodes")]

import numpy as np
import torch
from departing import PLACES
from pretend import Nodes
from ranks import find_mpirun
from zygote import Zygote

import fedlada_mpi.evaluate
import fedlada_mpi.trainer  # noqa: F401  (once for all forked references)
from data_prep import PrepareSettings, prepare
from fedlada_mpi.data.manifest import read_manifest
from fedlada_mpi.data.owners import owned_clients

ROUNDS, CLIENTS, LIMIT = 6, 20, 120
METHODS = ("fedlada", "scaffold", "fedadam", "fedcm")
SETTINGS = f"--rounds {ROUNDS} --local-steps 2 --participation 0.4 --eval-every 2 --sums exact --device cpu".split()
ON_ROOT = ("server", "record", "results")


class Campaign:
    def __init__(self, work: Path, seed: int, zygote: Zygote):
        self.zygote, self.work, self.random = zygote, work, random.Random(seed)
        self.data = work / "digits"
        prepare(PrepareSettings("digits", self.data, clients=CLIENTS, silos=3))
        self.manifest = read_manifest(self.data)
        self.tried: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.lost_ranks = 0
        self.references: dict[str, Path] = {}
        self.names = iter(range(10**9))
        for line in (ROOT / "jobs" / "mpi.env").read_text().splitlines():
            if line and not line.startswith("#"):
                os.environ.setdefault(*line.split("=", 1))
        os.environ["OMP_NUM_THREADS"] = "1"

    def out(self) -> Path:
        return self.work / f"run{next(self.names)}"

    def trial(self, kind: str, nodes: Nodes | None = None) -> None:
        """One run with a loss of this kind."""
        draw = self.random
        ranks, method, adopt = draw.randint(4, 8), draw.choice(METHODS), draw.random() < 0.3
        victim = 0 if kind == "server" else draw.randrange(1, ranks)
        place = draw.choice([place for place in PLACES if victim == 0 or place not in ON_ROOT])
        number = 1 if place in ("start", "recovery", "results") else draw.randint(1, ROUNDS)
        delay = draw.choice((0.0, draw.uniform(1e-5, 5e-3)))
        faults: dict[str, Any] = {str(victim): [place, number, -1.0 if kind == "stop" else delay]}
        if place == "recovery":  # of another loss
            other = draw.choice([rank for rank in range(1, ranks) if rank != victim])
            faults[str(other)] = ["train", draw.randint(1, ROUNDS), 0.0]
        out = self.out()
        options = ["--algorithm", method, "--checkpoint-every", "2", *(["--adopt"] if adopt else [])]
        words = [json.dumps(faults), *SETTINGS, *options, "--dataset", str(self.data), "--out", str(out)]
        what = f"{ranks} ranks {' '.join(words)}"
        line = [find_mpirun() or "", "--with-ft", "ulfm", "-n", str(ranks)]
        line += [*self.zygote.command, *words]
        log = out.with_suffix(".log")
        with open(log, "w") as file:
            process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            status = -1
            os.killpg(process.pid, signal.SIGKILL)
        self.judge(kind, what, method, ranks, adopt, out, status, log)

    def judge(
        self, kind: str, what: str, method: str, ranks: int, adopt: bool, out: Path, status: int, log: Path
    ) -> None:
        self.tried[kind] += 1
        try:
            if status == -1:
                raise AssertionError("hangs")
            assert status == 0, f"status {status}"
            summary = json.loads((out / "summary.json").read_text())
            assert (summary["status"], summary["rounds"]) == ("finished", ROUNDS), "not finished"
            left = [(s["from"], [x["rank"] for x in s["left"]]) for s in summary["segments"] if "left" in s]
            self.lost_ranks += sum(len(gone) for _, gone in left)
            reference = self.reference(method, ranks, [] if adopt else left)
            mine, other = (torch.load(path / "model.pt", weights_only=True) for path in (out, reference))
            assert all(torch.equal(mine[name], other[name]) for name in other), f"another model; left {left}"
            mine, other = ([json.loads(x) for x in (p / "metrics.jsonl").open()] for p in (out, reference))
            for name in ("round", "participants", "test_acc", "test_loss"):
                assert [r[name] for r in mine] == [r[name] for r in other], f"other {name}; left {left}"
            if not (out / "checkpoint" / f"round_{ROUNDS:06d}").is_dir():
                raise AssertionError("no last checkpoint")
        except (AssertionError, OSError, ValueError, KeyError) as error:
            self.wrong[kind] += 1
            print(f"WRONG {kind}: {error}: {what}", flush=True)
            print("\n".join(log.read_text().splitlines()[-30:]), flush=True)
        else:
            shutil.rmtree(out)
            log.unlink()

    def reference(self, method: str, ranks: int, left: list[tuple[int, list[int]]]) -> Path:
        """A run of one process, without the clients of lost ranks from the same rounds on."""
        key = json.dumps([method, ranks if left else 0, left])
        if key not in self.references:
            owned = owned_clients(self.manifest, ranks - 1)
            gone = [(first, owned[rank - 1]) for first, lost in left for rank in lost if rank]
            out = self.references[key] = self.out()
            pid = os.fork()
            if not pid:
                os._exit(_forked(["--algorithm", method, "--dataset", str(self.data), "--out", str(out)], gone, out))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, f"the reference failed: {out}"
        return self.references[key]


def _forked(arguments: list[str], gone: list[tuple[int, np.ndarray]], out: Path) -> int:
    from fedlada_mpi import rng
    from fedlada_mpi.run import main

    sampled = rng.participants

    def participants(clients: int, share: float, sampling: str, seed: int, t: int) -> np.ndarray:
        lost = [client for first, lost in gone if t + 1 >= first for client in lost]
        return np.setdiff1d(sampled(clients, share, sampling, seed, t), lost)

    rng.participants = participants
    handle = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    return main([*SETTINGS, *arguments])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--silo", type=int, default=200)
    parser.add_argument("--server", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "helpers")))
    with tempfile.TemporaryDirectory(prefix="departures-") as work, Zygote() as zygote:
        campaign = Campaign(Path(work), options.seed, zygote)
        for kind in ("silo", "server"):
            for _ in range(getattr(options, kind)):
                campaign.trial(kind)
        for kind, count in campaign.tried.items():
            wrong = campaign.wrong[kind]
            print(f"{kind} | {count} | {'as expected' if not wrong else f'{wrong} WRONG'}", flush=True)
    took = time.monotonic() - start
    print(f"{campaign.lost_ranks} ranks were lost in these runs, which took {took:.0f} s", flush=True)
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
