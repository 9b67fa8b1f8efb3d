"""Runs with ``-n 3`` that are killed or told to stop at any moment from their start to their end; and odd callbacks.

    python tests/campaigns/starts.py                   every 50 ms, in a random order: hours
    python tests/campaigns/starts.py --minutes 10      as many of them as fit
    python tests/campaigns/starts.py --only callbacks --minutes 2

One rank, all ranks, mpirun or the process that was started gets a signal, in a new directory or, with ``--overwrite``,
in that of an older run. Each must end within two minutes, with status 0 only if it has written the result of this very
start, and leave no process. Started again, it must give the undisturbed result. Callbacks raise on the root, or return
what is odd: all ranks must end, and the root must see its own exception. Prints one row per kind.
"""

# ruff: noqa: E402  (the path comes first)
from __future__ import annotations

import argparse
import itertools
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
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import torch
from fork_server import ForkServer
from ranks import find_mpirun

from data_prep import PrepareSettings, prepare
from fedlada_mpi.support.processes import children, state

ROUNDS, RANKS, LIMIT = 4, 3, 120
SETTINGS = (
    f"--algorithm fedavg --rounds {ROUNDS} --checkpoint-every 2 --local-steps 2 --participation 0.2 --eval-every 2 "
    "--sums exact --adopt --device cpu --patience 30"
).split()
WHO = {
    "a rank": (signal.SIGKILL,),
    "all ranks": (signal.SIGKILL,),
    "mpirun": (signal.SIGKILL,),
    "the command": (signal.SIGKILL, signal.SIGINT, signal.SIGTERM),
}
MODES = ("new", "over an older run")

CALLBACK = """
import json, os, sys
import numpy as np, torch
import fedlada_mpi
class Own(BaseException): pass
what, number, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
rank = os.environ["OMPI_COMM_WORLD_RANK"]
def on_round(record):
    if record["round"] == number:
        return eval(what)
def throw(error): raise error
try:
    summary = fedlada_mpi.train(**settings, on_round=on_round, quiet=True).summary
    end = f"{summary['status']} {summary['rounds']}"
except BaseException as error:
    end = type(error).__name__
os.write(1, f"RANK {rank}: {end}\\n".encode())
"""
RAISED = (
    *("LookupError", "KeyboardInterrupt", "GeneratorExit", "StopIteration", "SystemExit", "Own", "MemoryError"),
    *("RecursionError", "StopAsyncIteration", "OSError", "BaseException", "AssertionError", "UnicodeError"),
)
STOPS = ("False", "np.False_", "np.array(False)", "torch.tensor(False)", "np.bool_(0)")
GOES_ON = (
    *("None", "True", "0", "0.0", "''", "[]", "np.True_", "np.float32(0)", "np.array([])", "torch.tensor(0.)"),
    *("float('nan')", "object()", "np.array([False, False])", "torch.zeros(2, dtype=torch.bool)", "record.clear()"),
)


class Campaign:
    def __init__(self, work: Path, server: ForkServer, seed: int):
        self.work, self.server, self.random = work, server, random.Random(seed)
        self.names = iter(range(10**9))
        self.tried: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.data = work / "digits"
        prepare(PrepareSettings("digits", self.data, clients=20, silos=2))
        began = time.monotonic()
        self.whole, self.older = self.out(), self.out()
        assert self.command(self.whole).wait(LIMIT) == 0
        self.seconds = time.monotonic() - began
        assert self.command(self.older, "--seed", "7").wait(LIMIT) == 0

    def out(self) -> Path:
        return self.work / f"run{next(self.names)}."

    def command(self, out: Path, *more: str) -> subprocess.Popen[bytes]:
        words = ["-m", "fedlada_mpi.run", "-n", str(RANKS), "--dataset", str(self.data), "--out", str(out)]
        log = open(out.with_suffix(".log"), "ab")  # noqa: SIM115
        return subprocess.Popen([self.server.python, *words, *SETTINGS, *more], stdout=log, stderr=log)

    def trials(self, every: float) -> list[tuple[str, int, str, float]]:
        """Who gets which signal, where the run writes, and after how many seconds."""
        moments = [i * every for i in range(int(1.1 * self.seconds / every))]
        kinds = [(who, number) for who, numbers in WHO.items() for number in numbers]
        found = [(*kind, mode, moment) for kind, mode, moment in itertools.product(kinds, MODES, moments)]
        self.random.shuffle(found)
        return found

    def trial(self, who: str, number: int, mode: str, moment: float) -> None:
        kind = f"{signal.Signals(number).name} to {who}, {mode}"
        self.tried[kind] += 1
        out = self.out()
        options = [] if mode == "new" else ["--overwrite"]
        if options:
            shutil.copytree(self.older, out)
        process = self.command(out, *options)
        try:
            self.disturb(process, out, who, number, moment)
            status = self.end(process)
            self.statuses[f"status {status}"] += 1
            self.nothing_left(out)
            if status == 0:
                self.compare(out)
            out.with_suffix(".log").open("a").write(f"status {status}; again:\n")
            again = self.end(self.command(out, *(options or ["--resume"])))
            assert again == 0, f"again, it ended with {again}"
            self.compare(out)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            self.wrong[kind] += 1
            print(f"WRONG {kind} after {moment:.2f} s: {error}", flush=True)
            print("\n".join(out.with_suffix(".log").read_text().splitlines()[-30:]), flush=True)
        else:
            shutil.rmtree(out, ignore_errors=True)

    def disturb(self, process: subprocess.Popen[bytes], out: Path, who: str, number: int, moment: float) -> None:
        """Send the signal; for ranks and mpirun, the time counts from when they are there."""
        if who != "the command":
            while not (found := mpirun_and_ranks(out)) and process.poll() is None:
                time.sleep(0.01)
            time.sleep(moment)
            mpirun, ranks = mpirun_and_ranks(out) or found or (0, [])
            targets = {"a rank": ranks and [self.random.choice(ranks)], "all ranks": ranks, "mpirun": [mpirun]}[who]
        else:
            time.sleep(moment)
            targets = [process.pid] if process.poll() is None else []
        for pid in filter(None, targets):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            left = [process.pid, *named(str(process.args[8])), *children(self.server._process.pid)]
            waiting = {pid: f"{state(pid)} {Path(f'/proc/{pid}/wchan').read_text()}" for pid in left}
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"hangs: {waiting}") from None

    def nothing_left(self, out: Path) -> None:
        end = time.monotonic() + 15
        while left := [
            *named(str(out)),
            *(pid for pid in children(self.server._process.pid) if state(pid) not in "ZX"),
        ]:
            if time.monotonic() > end:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"processes are left: {left}")
            time.sleep(0.05)

    def compare(self, out: Path) -> None:
        summary = json.loads((out / "summary.json").read_text())
        assert (summary["status"], summary["rounds"]) == ("finished", ROUNDS), "not finished"
        mine, other = (torch.load(path / "model.pt", weights_only=True) for path in (out, self.whole))
        assert all(torch.equal(mine[name], other[name]) for name in other), "another model"
        mine, other = ([json.loads(x) for x in (p / "metrics.jsonl").open()] for p in (out, self.whole))
        for name in ("round", "participants", "test_acc", "test_loss"):
            assert [r[name] for r in mine] == [r[name] for r in other], f"other {name}"

    def callback(self) -> None:
        """A random answer of ``on_round``, in a random round, under a random mpirun."""
        draw = self.random
        kind = draw.choice(("raises", "stops", "goes on"))
        error = draw.choice(RAISED)
        what = {"raises": f"throw({error}('x'))", "stops": draw.choice(STOPS), "goes on": draw.choice(GOES_ON)}[kind]
        number, tolerant, out = draw.randint(1, 3), draw.random() < 0.5, self.out()
        self.tried[f"on_round {kind}"] += 1
        settings = dict(dataset=str(self.data), out=str(out), rounds=3, local_steps=1, checkpoint_every=1, device="cpu")
        words = ["-n", str(RANKS), self.server.python, "-c", CALLBACK, what, str(number), json.dumps(settings)]
        line = [find_mpirun() or "", *(["--with-ft", "ulfm"] if tolerant else []), *words]
        log = out.with_suffix(".log")
        with log.open("wb") as file:
            process = subprocess.Popen(line, stdout=file, stderr=file, start_new_session=True)
        stopped = f"stopped {number}" if number < 3 else "finished 3"
        expected = {"raises": [error] + ["UserError"] * 2, "stops": [stopped] * 3, "goes on": ["finished 3"] * 3}[kind]
        try:
            process.wait(LIMIT)
            ends = sorted(line for line in log.read_text().splitlines() if line.startswith("RANK"))
            assert ends == [f"RANK {rank}: {end}" for rank, end in enumerate(expected)], f"{ends}"
            self.nothing_left(out)
        except (AssertionError, subprocess.TimeoutExpired) as wrong:
            self.wrong[f"on_round {kind}"] += 1
            print(f"WRONG on_round {what} in round {number}, tolerant {tolerant}: {wrong}", flush=True)
            print("\n".join(log.read_text().splitlines()[-30:]), flush=True)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(out, ignore_errors=True)


def named(text: str) -> list[int]:
    """The processes with this in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if text.encode() in words and state(int(path.name)) not in "ZX":
            found.append(int(path.name))
    return found


def mpirun_and_ranks(out: Path) -> tuple[int, list[int]] | None:
    pids = named(str(out))
    for pid in pids:
        if ranks := sorted(children(pid) & set(pids)):
            return pid, ranks
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=0.05, help="seconds between the moments that are tried")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--only", choices=("signals", "callbacks"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for line in (ROOT / "jobs" / "mpi.env").read_text().splitlines():
        if line and not line.startswith("#"):
            os.environ.setdefault(*line.split("=", 1))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="starts-") as work, ForkServer() as server:
        campaign = Campaign(Path(work), server, options.seed)
        trials = campaign.trials(options.every) if options.only != "callbacks" else []
        while time.monotonic() < end and (trials or options.only == "callbacks"):
            if trials:
                campaign.trial(*trials.pop())
            if options.only != "signals":
                campaign.callback()
        for kind, count in sorted(campaign.tried.items()):
            wrong = campaign.wrong[kind]
            print(f"{kind} | {count} | {'as expected' if not wrong else f'{wrong} WRONG'}", flush=True)
        print(", ".join(f"{name}: {count}" for name, count in sorted(campaign.statuses.items())), flush=True)
    return 1 if campaign.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
