"""Accidents to the output directory of a run, at random moments: it ends with all its files, or with one error line.

    python tests/campaigns/directories.py --trials 100 --seed 3

The directory is moved, removed, emptied or replaced, single files are removed or cut, the file size is limited, or a
second run is started there. Status 0 is right if every file is there, with the results of an undisturbed run. Prints a
row for each accident: how often, and what came of it; ends with 1 if a run was silent about what it lacks. Runs as root
ignore permissions, so chmod is tried by other users only.
"""

# ruff: noqa: E402  (the path comes first)
from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from training_runs import Run, arguments, make_data, same

# Imported once for all forked runs, but not MPI, which each of them must start itself.
import fedlada_mpi.rounds.evaluate
import fedlada_mpi.rounds.trainer  # noqa: F401

ROUNDS = 30
SETTINGS = dict(
    algorithm="scaffold", rounds=ROUNDS, local_steps=1, participation=0.5, checkpoint_every=3, eval_every=1,
    eval_clients=1,
)  # fmt: skip
FILES = ("config.json", "metrics.jsonl", "clients.h5", "checkpoint", "run.lock")
ENDED = "finished after"  # in the last lines of a run


class Process:
    """A run in a process of its own, forked, which saves the imports."""

    def __init__(self, data, out: Path, *flags: str):
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        handle = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(handle, stream)
        status = 1
        try:
            from fedlada_mpi.run import main

            status = main([*arguments(data, out, SETTINGS), *flags])
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def running(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is None

    def wait(self) -> int:
        while self.running():
            time.sleep(0.01)
        assert self.status is not None
        return self.status

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Campaign:
    def __init__(self, work: Path, seed: int):
        self.work, self.random = work, random.Random(seed)
        self.data = make_data(work / "data", [4, 6, 5])
        self.names = iter(range(10**9))
        self.taken: Counter[tuple[str, str]] = Counter()
        self.failures = 0
        begin = time.monotonic()
        whole = Process(self.data, work / "whole")
        while not (work / "whole" / "metrics.jsonl").exists() and whole.running():
            time.sleep(0.001)
        started = time.monotonic()
        assert whole.wait() == 0, whole.text
        self.whole, self.seconds = Run(work / "whole", self.data), time.monotonic() - started
        print(f"a run takes {started - begin:.1f} s to its first file, and {self.seconds:.1f} s from there", flush=True)

    def trial(self) -> None:
        name = self.random.choice(list(ACCIDENTS))
        out = self.work / f"run{next(self.names)}"
        process = Process(self.data, out)
        while not (out / "metrics.jsonl").exists() and process.running():
            time.sleep(0.001)
        time.sleep(self.random.uniform(0, self.seconds))
        try:
            ACCIDENTS[name](self, out, process)
        except OSError:
            self.taken[name, "the accident itself failed"] += 1
            process.wait()
            return
        time.sleep(0.005)
        if ENDED in process.text or not process.running():
            outcome = "too late"
            process.wait()
        else:
            outcome = self.outcome(out, process)
        self.taken[name, outcome.partition(":")[0]] += 1
        if outcome.startswith("WRONG"):
            self.failures += 1
            print(f"{name}, {out}: {outcome}\n{process.text[-1500:]}", flush=True)
        else:
            shutil.rmtree(out, ignore_errors=True)

    def outcome(self, out: Path, process: Process) -> str:
        status, text = process.wait(), process.text
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        if status:
            return f"one line, status {status}" if len(errors) == 1 and "Traceback" not in text else f"WRONG: {status}"
        try:
            same(Run(out, self.data), self.whole)
            assert (out / "clients.h5").read_bytes() == (self.whole.out / "clients.h5").read_bytes()
            assert (out / "config.json").is_file()
            assert list((out / "checkpoint").glob(f"round_*{ROUNDS}/files.json"))
        except (AssertionError, OSError, ValueError) as error:
            return f"WRONG: status 0, but {type(error).__name__}: {error}"
        return "all there, with a note" if "note: " in text else "all there"

    # What can happen to a directory.

    def move(self, out: Path, process: Process) -> None:
        out.rename(out.with_name(out.name + "-moved"))

    def remove(self, out: Path, process: Process) -> None:
        shutil.rmtree(out, ignore_errors=True)

    def empty(self, out: Path, process: Process) -> None:
        self.remove(out, process)
        out.mkdir(exist_ok=True)

    def link(self, out: Path, process: Process) -> None:
        """Moved, with a link in its place."""
        self.move(out, process)
        out.symlink_to(out.with_name(out.name + "-moved"))

    def other_directory(self, out: Path, process: Process) -> None:
        self.move(out, process)
        out.mkdir()
        (out / "notes.txt").write_text("mine")

    def other_file(self, out: Path, process: Process) -> None:
        self.move(out, process)
        out.write_text("mine")

    def one_file(self, out: Path, process: Process) -> None:
        path = out / self.random.choice(FILES)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()

    def cut(self, out: Path, process: Process) -> None:
        path = out / self.random.choice(["metrics.jsonl", "config.json"])
        os.truncate(path, self.random.randrange(path.stat().st_size + 1))

    def move_and_back(self, out: Path, process: Process) -> None:
        self.move(out, process)
        time.sleep(self.random.uniform(0, 0.02))
        out.with_name(out.name + "-moved").rename(out)

    def limit(self, out: Path, process: Process) -> None:
        """On the size of files, as of a full disk."""
        size = self.random.randrange(10_000, 200_000)  # the log of the run must fit
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))

    def protect(self, out: Path, process: Process) -> None:
        out.chmod(0o500)

    def second_run(self, out: Path, process: Process) -> None:
        other = Process(self.data, out, self.random.choice(["--resume", "--overwrite"]))
        was_running = process.running()
        status = other.wait()
        if was_running and process.running() and (status != 2 or "is in use by" not in other.text):
            self.failures += 1
            print(f"a second run in {out}: {status}: {other.text[-500:]}", flush=True)

    def second_run_without_lock(self, out: Path, process: Process) -> None:
        """Where somebody has removed the lock."""
        (out / "run.lock").unlink()
        Process(self.data, out, "--overwrite").wait()


ACCIDENTS: dict[str, Callable[[Campaign, Path, Process], None]] = {
    "moved": Campaign.move,
    "removed": Campaign.remove,
    "emptied": Campaign.empty,
    "moved behind a link": Campaign.link,
    "replaced by a directory": Campaign.other_directory,
    "replaced by a file": Campaign.other_file,
    "one file removed": Campaign.one_file,
    "one file cut": Campaign.cut,
    "moved and back": Campaign.move_and_back,
    "file sizes limited": Campaign.limit,
    "a second run": Campaign.second_run,
    "a second run, lock removed": Campaign.second_run_without_lock,
    **({"no permission to write": Campaign.protect} if os.geteuid() else {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="directories-") as work:
        tempfile.tempdir = work  # for the logs of all runs
        campaign = Campaign(Path(work), options.seed)
        for _ in range(options.trials):
            campaign.trial()
    for (name, outcome), count in sorted(campaign.taken.items()):
        print(f"| {name} | {count} | {outcome} |")
    return int(campaign.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
