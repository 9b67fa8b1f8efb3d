"""Runs that are killed, run out of disk or diverge, and are then resumed: the result must be the uninterrupted one.

    python tests/campaigns/kills.py --trials 50              random kills, and every write of a run
    python tests/campaigns/kills.py --every 9 --only writes  every ninth write, a minute
    python tests/campaigns/kills.py --data survival own      the same for runs that learn something else

Prints one row per kind: what was tried | how often | what happened. Ends with 1 if a result differs, naming the case.
"""

# ruff: noqa: E402  (the path comes first)
from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import h5py
import numpy as np
from faults import FIRED, Fault
from ranks import find_mpirun
from training_runs import Run, same

# Imported once for all forked runs, but not MPI, which each of them must start itself.
import fedlada_mpi.rounds.evaluate
import fedlada_mpi.rounds.trainer  # noqa: F401
from data_prep import PrepareSettings, prepare

FAULTS = ROOT / "tests" / "helpers" / "faults.py"
ROUNDS = 3
SETTINGS = (
    f"--algorithm scaffold --rounds {ROUNDS} --checkpoint-every 1 --eval-every 2 --local-steps 2 --device cpu --seed 3 "
    "--eval-clients 2 "
)
OWN = """
import torch
from fedlada_mpi import Task, whole


class Quantile(Task):
    objective = "-loss"
    metrics = {"covered": lambda outputs, targets: (targets <= outputs[:, 0]).float(),
               "largest": whole(lambda outputs, targets: float(outputs.max()))}

    def loss(self, outputs, targets):
        error = targets - outputs[:, 0]
        return torch.maximum(0.9 * error, -0.1 * error)

    def outputs(self):
        return (1,)
"""
# What a campaign's runs learn: the data set, and settings of the runs.
LEARNT = {
    "digits": ("digits", "--clients 50 --participation 0.06"),
    "regression": ("randhie", "--participation 0.5 --batch-size 8"),
    "survival": ("dd", "--participation 0.4 --batch-size 8"),
    "cox": ("dd", "--participation 0.4 --batch-size 8 --loss cox"),
    "next-token": ("text", "--participation 0.5 --batch-size 4 --model causal_cnn"),
    "segmentation": ("digit-masks", "--participation 0.4 --batch-size 8"),
    "multilabel": ("digit-mosaics", "--participation 0.4 --batch-size 8"),
    "own": ("randhie", "--participation 0.5 --batch-size 8 --task {work}/own.py:Quantile"),
}


class Campaign:
    def __init__(self, work: Path, seed: int, every: int, learnt: str):
        self.work, self.every, self.random, self.learnt = work, every, random.Random(seed), learnt
        self.names = iter(range(10**9))
        self.tried: Counter[str] = Counter()
        self.failures: list[str] = []
        self.data = work / learnt
        dataset, self.settings = LEARNT[learnt]
        (work / "own.py").write_text(OWN)
        prepare(PrepareSettings(dataset, self.data, **self._source(dataset), silos=2, validation=0.1))
        self.wholes: dict[int, Run] = {}
        for variable in (ROOT / "jobs" / "mpi.env").read_text().splitlines():
            if variable and not variable.startswith("#"):
                os.environ.setdefault(*variable.split("=", 1))
        os.environ["OMP_NUM_THREADS"] = "1"

    def _source(self, dataset: str) -> dict[str, Any]:
        """Texts of three clients, a few pages each."""
        if dataset != "text":
            return {}
        folder = self.work / "letters"
        folder.mkdir(exist_ok=True)
        for client in range(3):
            words = (self.random.choice(("to ", "be ", "or ", "not ")) for _ in range(300 + 100 * client))
            (folder / f"{client}.txt").write_text("".join(words))
        return {"raw": folder, "length": 20}

    def arguments(self, *more: str) -> list[str]:
        return ["--dataset", str(self.data), *(SETTINGS + self.settings.format(work=self.work)).split(), *more]

    def out(self) -> Path:
        return self.work / f"run{next(self.names)}"

    def whole(self, ranks: int) -> Run:
        if ranks not in self.wholes:
            out = self.out()
            assert self.start(ranks, out).wait() == 0
            self.wholes[ranks] = Run(out, None)
        return self.wholes[ranks]

    def start(self, ranks: int, out: Path, *more: str, fault: tuple[str, int, int] = ("kill", 0, 0)) -> Process:
        """A run with a fault (what, at which write, on which rank); alone it is forked, which saves the imports."""
        if ranks == 1:
            return Forked(out, self.arguments(*more), Fault(fault[0], fault[1], out))
        words = [str(FAULTS), *map(str, fault), str(out), *self.arguments(*more)]
        return Launched([find_mpirun(), "-n", str(ranks), sys.executable, *words], out)

    def resume(self, ranks: int, out: Path, what: str) -> None:
        """Resume until it is done, and compare."""
        what = self.named(what)
        self.tried[what] += 1
        expected, process = self.whole(ranks), self.start(ranks, out, "--resume")
        status = process.wait()
        try:
            assert status == 0, f"resumed: status {status}: {process.errors[-600:]}"
            same(Run(out, None), expected)
            for name in ("best.pt", "clients.h5"):
                assert (out / name).read_bytes() == (expected.out / name).read_bytes(), f"{name} differs"
            left = [str(path.relative_to(out)) for path in out.rglob("*.tmp")]
            assert not left, f"left behind: {left}"
        except (AssertionError, OSError, ValueError) as error:
            self.failures.append(f"{what}, {out}: {error}")
            print(f"DIFFERS {self.failures[-1]}", flush=True)
        else:
            shutil.rmtree(out)

    def named(self, what: str) -> str:
        return what if self.learnt == "digits" else f"{self.learnt}: {what}"

    def check(self, what: str, out: Path, condition: bool, message: str) -> None:
        what = self.named(what)
        if not condition:
            self.failures.append(f"{what}, {out}: {message}")
            print(f"WRONG {self.failures[-1]}", flush=True)

    def one_line(self, what: str, out: Path, process: Process, status: int, expected: int = 2) -> None:
        """It ended with this status and a single line that says why."""
        lines = [line for line in process.errors.splitlines() if line.startswith("error: ")]
        noise = any(word in process.errors for word in ("Traceback", "Segmentation", "core dumped"))
        self.check(
            what, out, status == expected and len(lines) == 1 and not noise, f"{status}: {process.errors[-900:]}"
        )

    # What can happen to a run.

    def writes(self, ranks: int, action: str) -> None:
        """Kill, or an error, at every write of each rank; a kill of one rank makes the launcher end the others."""
        for rank in range(ranks):
            what = f"{action} at every {self.every}. write of rank {rank} of {ranks}"
            for number in range(1 + self.random.randrange(self.every), 10**6, self.every):
                out = self.out()
                process = self.start(ranks, out, fault=(action, number, rank))
                status = process.wait()
                fired = out.with_name(out.name + FIRED)
                if not fired.exists():
                    break
                fired.unlink()
                if action != "kill" and status:  # some are made up for, as where a file system lacks a feature
                    self.one_line(what, out, process, status)
                    self.check(what, out, _intact(out), "a checkpoint is not complete")
                self.resume(ranks, out, what)

    def kills(self, ranks: int, trials: int) -> None:
        """SIGKILL of one rank or all of them at a random moment, up to three times in a row."""
        begin = time.monotonic()
        self.whole(ranks)
        took = time.monotonic() - begin + 1
        for trial in range(trials):
            which = "all ranks" if trial % 2 else "one rank"
            out, what = self.out(), f"SIGKILL of {which} of {ranks} at a random moment"
            for repeat in range(1 + self.random.randrange(3)):
                process = self.start(ranks, out, *(["--resume"] if repeat else []))
                time.sleep(self.random.uniform(0, took))
                process.kill(None if which == "all ranks" else self.random.randrange(ranks))
            self.resume(ranks, out, what)

    def full_disk(self, ranks: int, trials: int) -> None:
        """A file system of a random size, from nothing to all that a run writes; then it grows."""
        need = sum(path.stat().st_size for path in self.whole(ranks).out.rglob("*") if path.is_file())
        for _ in range(trials):
            what, size = f"disk full, {ranks} ranks", 4096 * self.random.randrange(4, need * 3 // 2 // 4096)
            with mounted(self.work / "full", size) as mount:
                out = mount / "run"
                process = self.start(ranks, out)
                status = process.wait()
                if status:
                    self.one_line(what, out, process, status)
                    self.check(what, out, _intact(out), "a checkpoint is not complete")
                    subprocess.run(["mount", "-o", "remount,size=100m", mount], check=True)
                    self.resume(ranks, out, what)

    def two_writers(self, ranks: int, trials: int) -> None:
        """A second run in the same directory is refused, and the first one goes on."""
        for _ in range(trials):
            out, what = self.out(), f"two runs at once, {ranks} ranks"
            first = self.start(ranks, out, "--resume")
            while not (out / "run.lock").exists() and first.running():
                time.sleep(0.005)
            first.signal(signal.SIGSTOP)
            for flags in ([], ["--resume"], ["--overwrite"]):
                second = self.start(1, out, *flags)
                self.one_line(what, out, second, second.wait())
            first.signal(signal.SIGCONT)
            self.check(what, out, first.wait() == 0, f"the first failed: {first.errors[-600:]}")
            self.resume(ranks, out, what)

    def nan(self, ranks: int, trials: int) -> None:
        """A rate so high that a round overflows: status 3, and all that was saved is finite; so it is again resumed."""
        for _ in range(trials):
            out, what = self.out(), f"diverges, {ranks} ranks"
            lr = str(10.0 ** self.random.uniform(0, 6))
            more = ["--lr", lr, "--weight-decay", "1000", "--clip", "0", "--rounds", "60"]
            self.tried[self.named(what)] += 1
            for flags in ([], ["--resume"]):
                process = self.start(ranks, out, *more, *flags)
                self.one_line(what, out, process, process.wait(), expected=3)
                self.check(what, out, _intact(out), "a checkpoint is damaged or not finite")


def _intact(out: Path) -> bool:
    """All checkpoints that have their name can be read, and are finite."""
    for folder in (out / "checkpoint").glob("round_*[0-9]"):
        for name in json.loads((folder / "files.json").read_text()):
            with h5py.File(folder / name) as file:
                found: list[bool] = []
                file.visititems(
                    lambda _, item, found=found: (
                        found.append(bool(np.isfinite(item[:]).all())) if isinstance(item, h5py.Dataset) else None
                    )
                )
            if not all(found):
                return False
    return True


@contextlib.contextmanager
def mounted(path: Path, size: int) -> Iterator[Path]:
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


class Process:
    """A run under way; its messages are in ``errors`` once it has ended."""

    pid: int
    log: Path

    @property
    def errors(self) -> str:
        return self.log.read_text()

    def wait(self) -> int:
        raise NotImplementedError

    def running(self) -> bool:
        raise NotImplementedError

    def kill(self, rank: int | None) -> None:
        raise NotImplementedError

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Forked(Process):
    def __init__(self, out: Path, arguments: list[str], fault: Fault):
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        for stream in (1, 2):
            os.dup2(os.open(self.log if stream == 2 else os.devnull, os.O_WRONLY | os.O_APPEND), stream)
        status = 1
        try:
            from fedlada_mpi.run import main

            fault.arm()
            status = main(["--out", str(out), *arguments])
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.stderr.flush()
            os._exit(status)

    def wait(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def running(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is None

    def kill(self, rank: int | None) -> None:
        if self.running():
            self.signal(signal.SIGKILL)
        self.wait()


class Launched(Process):
    def __init__(self, line: list[str], out: Path):
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=log, env=environment)
        self.pid = self.process.pid

    def wait(self) -> int:
        return self.process.wait(timeout=120)

    def running(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        return []

    def signal(self, number: int) -> None:
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, rank: int | None) -> None:
        pids = self.ranks()
        for pid in pids if rank is None else pids[rank : rank + 1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10, help="of everything random")
    parser.add_argument("--every", type=int, default=1, help="which of the writes: every n-th")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--only", nargs="*", default=["writes", "kills", "errors", "full", "two", "nan"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", nargs="*", choices=LEARNT, default=["digits"], help="what the runs learn")
    options = parser.parse_args()
    return max(campaign(learnt, options) for learnt in options.data)


def campaign(learnt: str, options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="kills-") as work:
        tempfile.tempdir = work  # for the logs of all runs
        campaign = Campaign(Path(work), options.seed, options.every, learnt)
        kinds: dict[str, Callable[[int], None]] = {
            "writes": lambda ranks: campaign.writes(ranks, "kill"),
            "kills": lambda ranks: campaign.kills(ranks, options.trials),
            "full": lambda ranks: campaign.full_disk(ranks, options.trials),
            "two": lambda ranks: campaign.two_writers(ranks, max(1, options.trials // 5)),
            "nan": lambda ranks: campaign.nan(ranks, max(1, options.trials // 5)),
        }
        for code in ("ENOSPC", "EDQUOT", "EROFS", "EIO"):
            kinds[f"errors {code}"] = lambda ranks, code=code: campaign.writes(ranks, code)
        for kind, tried in kinds.items():
            for ranks in options.ranks if kind.split()[0] in options.only else ():
                tried(ranks)
        tempfile.tempdir = None
        for what, count in campaign.tried.items():
            wrong = sum(failure.startswith(what) for failure in campaign.failures)
            print(f"{what} | {count} | {'as expected' if not wrong else f'{wrong} WRONG'}", flush=True)
        return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
