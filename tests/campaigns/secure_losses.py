"""Secure runs whose silos are killed at every call of a round: the others go on, and no sum tells a lost silo's own.

    python tests/campaigns/secure_losses.py                    200 killed silos, and 20 jobs that are killed and resumed
    python tests/campaigns/secure_losses.py --kills 30 --resumes 3 --seed 4

Every run has six silos, of which one to three are killed under ``mpirun --with-ft ulfm``: the first at call 1, 2, 3 and
so on of its rounds, the others at any. It must end with all rounds. Other jobs end when a silo is killed, and are
resumed with all silos or with fewer. In none may a silo use a mask twice, or send sums of the same inputs with others.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import losing
import torch
from ranks import find_mpirun, python
from to_its_end import HANGS, run_to_its_end

from data_prep import PrepareSettings, prepare

SILOS, FEWEST, ROUNDS = 6, 3, 4
LOSING = str(ROOT / "tests" / "helpers" / "losing.py")
LIMIT = 150  # seconds
METHODS = (
    "fedlada",
    "fedlada --transport shared",
    "scaffold",
    "fednova --weighting size",
    "fedavg --sampling bernoulli --participation 0.7",
)
SETTINGS = (
    f"--secure --min-silos {FEWEST} --rounds {ROUNDS} --local-steps 2 --participation 1 --eval-every 1 "
    "--checkpoint-every 2 --device cpu --model linear"
)


class Campaign:
    def __init__(self, work: Path, seed: int):
        self.work, self.random = work, random.Random(seed)
        self.data = work / "digits"
        prepare(PrepareSettings("digits", self.data, clients=18, silos=3))
        self.names = iter(range(10**9))
        self.calls = self.call = 0  # of a run, and the last one before which a silo was killed
        self.tried: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        for line in (ROOT / "jobs" / "mpi.env").read_text().splitlines():
            if line and not line.startswith("#"):
                os.environ.setdefault(*line.split("=", 1))
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "helpers")))

    def measure(self) -> None:
        """How many calls of MPI a silo makes from the first round to the last."""
        out = self.out()
        status, printed = self.run(SILOS + 1, out, {}, METHODS[0], tolerant=True)
        assert status == 0, printed[-2000:]
        self.calls = max(line.get("calls", 0) for line in losing.entries(self.log(out))[1])
        shutil.rmtree(out)

    def out(self) -> Path:
        return self.work / f"run{next(self.names)}"

    @staticmethod
    def log(out: Path) -> Path:
        return out.with_name(f"{out.name}-log")

    def run(
        self, ranks: int, out: Path, kills: dict[int, int], method: str, tolerant: bool, *more: str
    ) -> tuple[int, str]:  # fmt: skip
        """Its status, and what it printed."""
        launcher = [find_mpirun() or "", *(["--with-ft", "ulfm"] if tolerant else []), "-n", str(ranks)]
        words = [*SETTINGS.split(), "--algorithm", *method.split(), "--dataset", str(self.data), "--out", str(out)]
        line = [*launcher, python(), LOSING, str(self.log(out)), json.dumps(kills), *words, *more]
        return run_to_its_end(line, self.work / "printed", LIMIT)

    def loss(self) -> None:
        """One to three silos are killed, the others go on."""
        draw, method = self.random, self.random.choice(METHODS)
        self.call = self.call % self.calls + 1
        victims = draw.sample(range(1, SILOS + 1), draw.randint(1, SILOS - FEWEST))
        kills = {rank: draw.choice((self.call, draw.randint(1, self.calls))) for rank in victims}
        kills[victims[0]] = self.call
        out = self.out()
        status, printed = self.run(SILOS + 1, out, kills, method, tolerant=True)
        self.judge("lost silos", f"{kills} {method}", out, status, printed)

    def resume(self) -> None:
        """A job ends with one of its silos, up to twice, and is resumed with all silos, or with fewer."""
        draw, method, out = self.random, self.random.choice(METHODS), self.out()
        ranks, story, more = SILOS + 1, [], []
        for _ in range(draw.randint(1, 2)):
            kills = {draw.randrange(1, ranks): draw.randint(1, self.calls)}
            story.append(f"{ranks} ranks {kills}")
            self.run(ranks, out, kills, method, False, *more)
            if (out / "config.json").exists():
                more = ["--resume"]
            ranks -= draw.randint(0, 1)
        status, printed = self.run(ranks, out, {}, method, False, *more)
        self.judge("resumed jobs", f"{' '.join(story)} {ranks} ranks {method}", out, status, printed)

    def judge(self, kind: str, what: str, out: Path, status: int, printed: str) -> None:
        self.tried[kind] += 1
        log = self.log(out)
        killed = [line["killed"] for lines in losing.entries(log).values() for line in lines if "killed" in line]
        self.killed[kind] += len(killed)
        self.places.update(killed)
        if self.tried[kind] % 10 == 0:
            print(f"{kind}: {self.tried[kind]} runs, {self.killed[kind]} kills so far", flush=True)
        try:
            assert status != HANGS, "hangs"
            assert status == 0, f"status {status}"
            summary = json.loads((out / "summary.json").read_text())
            assert (summary["status"], summary["rounds"]) == ("finished", ROUNDS), "not finished"
            rounds = [json.loads(line)["round"] for line in (out / "metrics.jsonl").open()]
            assert rounds == list(range(1, ROUNDS + 1)), f"rounds {rounds}"
            model = torch.load(out / "model.pt", weights_only=True)
            assert all(torch.isfinite(values).all() for values in model.values()), "not finite"
            assert not (wrong := losing.keys_used_twice(log)), wrong
            assert not (wrong := losing.sums_that_tell(log)), wrong
        except (AssertionError, OSError, ValueError, KeyError) as error:
            self.wrong[kind] += 1
            print(f"WRONG {kind}: {error}: {what}", flush=True)
            print("\n".join(printed.splitlines()[-30:]), flush=True)
        else:
            shutil.rmtree(out)
            shutil.rmtree(log)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="silos to lose")
    parser.add_argument("--resumes", type=int, default=20, help="jobs to end and resume")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="secure-losses-") as work:
        campaign = Campaign(Path(work), options.seed)
        campaign.measure()
        print(f"a silo makes {campaign.calls} calls until its last sum", flush=True)
        while campaign.killed["lost silos"] < options.kills and time.monotonic() - start < options.seconds:
            campaign.loss()
        while campaign.tried["resumed jobs"] < options.resumes and time.monotonic() - start < options.seconds:
            campaign.resume()
        for kind, count in campaign.tried.items():
            wrong = f"{campaign.wrong[kind]} WRONG" if campaign.wrong[kind] else "as expected"
            print(f"{kind} | {count} runs, {campaign.killed[kind]} kills | {wrong}", flush=True)
        print(f"killed before: {dict(campaign.places)}; {time.monotonic() - start:.0f} s", flush=True)
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
