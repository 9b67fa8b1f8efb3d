"""Runs that lose ranks under ``mpirun --with-ft ulfm``: each must end, with the result of a run with these departures.

    python tests/campaigns/departures.py      200 silos, 50 servers, 20 stopped ranks, 20 nodes' ranks, 20 whole nodes
    python tests/campaigns/departures.py --silo 10 --server 5 --stop 0 --node 0 --power 0 --seed 3

Every run has 4 to 8 ranks, a random method, victim and moment. It is compared with a run of one process in which the
clients of the lost ranks take no part from the same round on, or with ``--adopt`` with an undisturbed one: ``--sums
exact`` gives the same bits on any ranks. A whole node goes with the daemon of mpirun, which then ends the job; the run
is resumed on the other nodes. Prints one row per kind, and ends with 1 if a run differs or hangs.
"""

# ruff: noqa: E402  (the path comes first)
from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "nodes")]

import departing
import numpy as np
import torch
from pretend import Nodes, wait_until
from ranks import find_mpirun, python
from to_its_end import HANGS, run_to_its_end

import fedlada_mpi.rounds.evaluate
import fedlada_mpi.rounds.trainer  # noqa: F401  (once for all forked references)
from data_prep import PrepareSettings, prepare
from fedlada_mpi.data.manifest import read_manifest
from fedlada_mpi.data.owners import owned_clients
from fedlada_mpi.rundir import lock

ROUNDS, CLIENTS = 6, 20
DEPARTING = str(ROOT / "tests" / "helpers" / "departing.py")
LIMIT = 150  # seconds
METHODS = ("fedlada", "scaffold", "fedadam", "fedcm")
VARIED = (  # what users bring: their models, aggregation and methods
    "fedlada --model model_zoo:Dropping",
    "fedcm --model model_zoo:Dropping --engine generic",
    "fedavg --model model_zoo:Skipping",
    "fedlada --robust median",
    "fedyogi --robust trimmed --trim 0.2",
    "fedprox --weighting size --sampling bernoulli",
    "feddyn --precision fp64",
    "mimelite --lr-schedule cosine --lr-warmup 2",
    "localadam --on-nonfinite skip --lr 3",
    "fedadam_amended --eval-clients 2",
)
SETTINGS = f"--rounds {ROUNDS} --local-steps 2 --participation 0.4 --eval-every 2 --sums exact --device cpu".split()
ON_ROOT = ("server", "record", "results")
PLACES = [place for place in departing.PLACES if place != "defect"]


class Campaign:
    def __init__(self, work: Path, seed: int, methods: Sequence[str] = METHODS):
        self.work, self.random, self.methods = work, random.Random(seed), methods
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

    def trial(self, kind: str) -> None:
        """One run with a loss of this kind."""
        draw = self.random
        ranks, method, adopt = draw.randint(4, 8), draw.choice(self.methods), draw.random() < 0.3
        victim = 0 if kind == "server" else draw.randrange(1, ranks)
        place = draw.choice([place for place in PLACES if victim == 0 or place not in ON_ROOT])
        number = 1 if place in ("start", "recovery", "results") else draw.randint(1, ROUNDS)
        delay = -1.0 if kind == "stop" else draw.choice((0.0, draw.uniform(1e-5, 5e-3)))
        faults = {victim: (place, number, delay)}
        if place == "recovery":  # of another loss
            other = draw.choice([rank for rank in range(1, ranks) if rank != victim])
            faults[other] = ("train", draw.randint(1, ROUNDS), 0.0)
        words = self.words(faults, method, adopt)
        status, printed = self.run(ranks, words)
        self.judge(kind, f"{ranks} ranks {' '.join(words)}", method, ranks, adopt, Path(words[-1]), status, printed)

    def run(self, ranks: int, words: list[str]) -> tuple[int, str]:
        """Its status, and what it printed."""
        line = [find_mpirun() or "", "--with-ft", "ulfm", "-n", str(ranks), python(), DEPARTING, *words]
        return run_to_its_end(line, self.work / "log", LIMIT)

    def words(
        self, faults: dict[int, tuple[str, int, float | str | None]], method: str, adopt: bool, *more: str
    ) -> list[str]:
        options = ["--algorithm", *method.split(), "--checkpoint-every", "2", *(["--adopt"] if adopt else []), *more]
        return [json.dumps(faults), *SETTINGS, *options, "--dataset", str(self.data), "--out", str(self.out())]

    def node(self, nodes: Nodes) -> None:
        """All ranks of one of three nodes die together, that of the server too."""
        draw = self.random
        method, adopt, victim = draw.choice(self.methods), draw.random() < 0.3, draw.randrange(3)
        place = draw.choice([place for place in PLACES if place not in (*ON_ROOT, "recovery")])
        number = 1 if place == "start" else draw.randint(1, ROUNDS)
        faults = {rank: (place, number, draw.choice((0.0, 1e-3))) for rank in (2 * victim, 2 * victim + 1)}
        words = self.words(faults, method, adopt)
        rank = [sys.executable, DEPARTING]
        line = [find_mpirun() or "", "--with-ft", "ulfm", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", "-n", "6", *rank]
        try:
            done = nodes.run([*line, *words], [2, 2, 2], os.environ, LIMIT)
            status, printed = done.returncode, done.stdout + done.stderr
        except AssertionError as error:
            status, printed = HANGS, str(error)
        self.judge("node", " ".join(words), method, 6, adopt, Path(words[-1]), status, printed)

    def power(self) -> None:
        """A whole node goes, the daemon of mpirun too, whose job must end; then the run is resumed on the others.

        Where the moment for it does not come, the run does not count.
        """
        draw = self.random
        method, victim, told = draw.choice(self.methods), draw.randrange(3), draw.random() < 0.5
        rank = 2 * victim + draw.randrange(2)
        elsewhere = ("train",) if rank == 0 else ON_ROOT
        place = draw.choice([place for place in PLACES if place not in ("recovery", *elsewhere)])
        number = draw.randint(1, 1 if place in ("start", "results") else 3)
        words = self.words({rank: (place, number, None)}, method, True)
        out, moment = Path(words[-1]), self.work / f"moment-{Path(words[-1]).name}"
        passed = [word for name in ("PYTHONPATH", "OMP_NUM_THREADS", "DEPARTING") for word in ("-x", name)]
        program = [sys.executable, DEPARTING]
        status, printed = HANGS, ""
        try:
            with Nodes(3) as nodes:
                # mpirun itself waits for a node without power until the kernel gives up, by default after 15 minutes.
                nodes.on("head", "sh", "-c", "echo 3 >/proc/sys/net/ipv4/tcp_retries2")
                env = {**os.environ, "DEPARTING": str(moment)}
                mpirun = [find_mpirun() or "", "--with-ft", "ulfm", *passed]
                started = nodes.start([*mpirun, "-n", "6", *program, *words], [2, 2, 2], env)
                wait_until(lambda: moment.exists() or started.process.poll() is not None, LIMIT, started.err.read_text)
                if not moment.exists():
                    return
                nodes.lose(nodes.names[victim], told)
                printed = str(started.finish(LIMIT))
                if lock.owner(out) and json.loads((out / lock.NAME).read_text())["host"] == nodes.names[victim]:
                    (out / lock.NAME).unlink()  # as the error says, or it is stale after three minutes
                slots = [2 if i != victim else 0 for i in range(3)]
                done = nodes.run([*mpirun, "-n", "4", *program, "{}", *words[1:], "--resume"], slots, env, LIMIT)
                status, printed = done.returncode, f"{printed}\n{done.stdout}{done.stderr}"
        except AssertionError as error:
            printed += str(error)
        self.judge("power", f"{'told' if told else 'cut'} {' '.join(words)}", method, 6, True, out, status, printed)

    def judge(
        self, kind: str, what: str, method: str, ranks: int, adopt: bool, out: Path, status: int, printed: str
    ) -> None:
        self.tried[kind] += 1
        try:
            self.lost_ranks += self.compare(method, ranks, adopt, out, status)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            self.wrong[kind] += 1
            print(f"WRONG {kind}: {error}: {what}", flush=True)
            print("\n".join(printed.splitlines()[-30:]), flush=True)
        else:
            shutil.rmtree(out)

    def compare(self, method: str, ranks: int, adopt: bool, out: Path, status: int) -> int:
        """Raise unless the run ended as it should; returns how many ranks it lost."""
        assert status != HANGS, "hangs"
        assert status == 0, f"status {status}"
        summary = json.loads((out / "summary.json").read_text())
        assert (summary["status"], summary["rounds"]) == ("finished", ROUNDS), "not finished"
        left = [(rank["after"] + 1, rank["rank"]) for rank in summary.get("left", [])]
        reference = self.reference(method, ranks, [] if adopt else left)
        mine, other = (torch.load(path / "model.pt", weights_only=True) for path in (out, reference))
        assert all(torch.equal(mine[name], other[name]) for name in other), f"another model; left {left}"
        mine, other = ([json.loads(x) for x in (p / "metrics.jsonl").open()] for p in (out, reference))
        for name in ("round", "participants", "test_acc", "test_loss"):
            assert [r[name] for r in mine] == [r[name] for r in other], f"other {name}; left {left}"
        assert (out / "checkpoint" / f"round_{ROUNDS:06d}").is_dir(), "no last checkpoint"
        return len(left)

    def reference(self, method: str, ranks: int, left: list[tuple[int, int]]) -> Path:
        """A run of one process, without the clients of lost ranks from the same rounds on."""
        key = json.dumps([method, ranks if left else 0, left])
        if key not in self.references:
            owned = owned_clients(self.manifest, ranks - 1)
            gone = [(first, owned[rank - 1]) for first, rank in left if rank]
            out = self.references[key] = self.out()
            pid = os.fork()
            if not pid:
                words = ["--algorithm", *method.split(), "--dataset", str(self.data), "--out", str(out)]
                os._exit(_forked(words, gone, out))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, f"the reference failed: {out}"
        return self.references[key]


def _forked(arguments: list[str], gone: list[tuple[int, np.ndarray]], out: Path) -> int:
    from fedlada_mpi.run import main
    from fedlada_mpi.support import rng

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
    parser.add_argument("--stop", type=int, default=20)
    parser.add_argument("--node", type=int, default=20, help="ranks of a node; needs root, for pretend nodes")
    parser.add_argument("--power", type=int, default=20, help="whole nodes; the same")
    parser.add_argument("--varied", action="store_true", help="Dropout, robust means, other methods and more")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "helpers")))
    with tempfile.TemporaryDirectory(prefix="departures-") as work:
        campaign = Campaign(Path(work), options.seed, VARIED if options.varied else METHODS)
        for kind in ("silo", "server", "stop"):
            for _ in range(getattr(options, kind)):
                campaign.trial(kind)
        if options.node:
            with Nodes(3) as nodes:
                for _ in range(options.node):
                    campaign.node(nodes)
        while campaign.tried["power"] < options.power:
            campaign.power()
        for kind, count in campaign.tried.items():
            wrong = campaign.wrong[kind]
            print(f"{kind} | {count} | {'as expected' if not wrong else f'{wrong} WRONG'}", flush=True)
    took = time.monotonic() - start
    print(f"{campaign.lost_ranks} ranks were lost in these runs, which took {took:.0f} s", flush=True)
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
