"""Experiments as data: list, count and run the runs of a grid.

    python -m fedlada_mpi.grid                                   # list the experiments
    python -m fedlada_mpi.grid main                              # list the runs of one
    python -m fedlada_mpi.grid main --count
    python -m fedlada_mpi.grid main --command 7                  # the command of run 7
    python -m fedlada_mpi.grid main --index 7 --launcher "srun --mpi=pmix"
    python -m fedlada_mpi.grid digits --all -n 4                 # on four ranks of this machine
    python -m fedlada_mpi.grid main --all --parallel 3           # three at once on this machine

A finished run is skipped, an interrupted one is resumed, and one that another process is running is left alone, so
the same grid can be split over any number of submissions. The exit status is that of the run (75: stopped by a
signal with a checkpoint).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import settings
from .experiments import Grid, Run, experiments, live, load, progress
from .experiments.parallel import LOG, Parallel
from .experiments.starting import STOPS, claimed, exit_status, passed_on, start
from .rundir import lock
from .settings import Parser
from .support import launcher as launching
from .support.errors import UserError
from .support.signals import STOPPED


def execute(run: Run, launcher: Sequence[str], signals: list[int] | None = None) -> int:
    """Start the run unless it is finished or another process is running it; returns its exit status.

    ``signals`` gets those that arrived meanwhile: a run that was about to end may not have seen them.
    """
    if run.finished():
        print(f"{run.directory}: already finished", flush=True)
        return 0
    with claimed(run) as to_do:
        if not to_do:
            print(f"{run.directory}: already finished", flush=True)
            return 0
        command = run.command(launcher)
        print(shlex.join(command), flush=True)
        status = _wait(command, bool(launcher), [] if signals is None else signals)
        if status == 0 and not run.finished():
            # As where a node was lost: what counts is what the run has written.
            done = f"{run.rounds_done()} of {run.rounds} rounds"
            print(f"error: {run.directory} ended with status 0 after {done}", file=sys.stderr, flush=True)
            return 1
        return status


def _wait(command: Sequence[str], launched: bool, signals: list[int]) -> int:
    """Run a command, passing on the signals that ask it to stop."""
    process: subprocess.Popen[bytes] | None = None
    pending: list[int] = []

    def forward(number: int, _frame: object) -> None:
        signals.append(number)
        pending.append(passed_on(number, launched))
        if process is not None:
            process.send_signal(pending.pop())

    def note(number: int, _frame: object) -> None:
        signals.append(number)

    # Ctrl-C reaches the run directly, as it is in the same process group; here we only wait for it.
    handlers = {signal.SIGTERM: forward, signal.SIGUSR1: forward, signal.SIGINT: note}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        process = start(command)
        while pending:
            process.send_signal(pending.pop())
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return exit_status(status)


def execute_all(grid: Grid, launcher: Sequence[str]) -> int:
    """Start the runs one after another; stops where one was stopped by a signal."""
    failed: list[int] = []
    signals: list[int] = []
    for index, run in enumerate(grid.runs):
        print(f"[{index + 1}/{len(grid.runs)}] {run.directory.name}", flush=True)
        try:
            status = execute(run, launcher, signals)
        except lock.Busy as busy:
            print(busy, flush=True)
            continue
        if status in STOPS or signals:
            return status or STOPPED
        if status:
            print(f"{run.directory}: failed with status {status}", file=sys.stderr, flush=True)
            failed.append(index)
    if failed:
        print(f"error: {len(failed)} of {len(grid.runs)} runs failed: {compact(failed)}", file=sys.stderr)
    return 1 if failed else 0


def execute_parallel(grid: Grid, launcher: Sequence[str], at_once: int, table: bool) -> int:
    """Start the runs, several at once; stops where a signal asks for it."""
    runs = Parallel(grid.runs, launcher, at_once, table)
    status = runs.execute()
    if runs.failed:
        failed = compact(sorted(runs.failed))
        print(f"error: {len(runs.failed)} of {len(grid.runs)} runs failed: {failed}", file=sys.stderr)
    return status


def compact(indices: Sequence[int]) -> str:
    """Indices as sbatch --array takes them: 0-3,7."""
    pieces = []
    for _, group in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        pieces.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(pieces)


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    """The settings of ``--set key=value``; a comma makes an axis."""
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals or not name.isidentifier():
            raise UserError(f"--set: got {text!r}, expected key=value with the name of a setting")
        of_lists = name in settings.SETTINGS and settings.SETTINGS[name].kind.startswith("list")
        changes[name] = value.split(",") if "," in value and not of_lists else value
    return changes


def _pick(grid: Grid, index: int) -> Run:
    if not 0 <= index < len(grid.runs):
        raise UserError(f"run {index} of {grid.name}: there are {len(grid.runs)} runs, 0 to {len(grid.runs) - 1}")
    return grid.runs[index]


def _parser() -> Parser:
    parser = Parser(prog="python -m fedlada_mpi.grid", description=__doc__.partition("\n")[0])
    parser.add_argument("experiment", nargs="?", help="name of an experiment, or a TOML file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list the runs (the default)")
    what.add_argument("--count", action="store_true", help="print the number of runs")
    what.add_argument("--command", type=int, metavar="I", help="print the command of run I")
    what.add_argument("--index", type=int, metavar="I", help="run number I, from 0")
    what.add_argument(
        "--all",
        action="store_true",
        help="run all, one after another or --parallel, on a terminal with a table of their progress",
    )
    what.add_argument(
        "--status", action="store_true", help="list the runs with rounds, accuracy, speed and expected end"
    )
    what.add_argument("--todo", action="store_true", help="print the unfinished runs, as sbatch --array takes them")
    parser.add_argument(
        "--parallel", type=int, metavar="N",
        help=f"with --all: N runs at once on this machine, each prints to its {LOG}; on a GPU they share it by MPS",
    )  # fmt: skip
    parser.add_argument("--runs", default="", metavar="DIR", help="where the run directories are [runs/EXPERIMENT]")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of every run; a,b is an axis"
    )
    parser.add_argument(
        "--launcher",
        default=os.environ.get("FEDLADA_LAUNCHER", ""),
        metavar="COMMAND",
        help='what starts the ranks, such as "srun --mpi=pmix" [$FEDLADA_LAUNCHER, else one rank]',
    )
    launching.add_argument(parser)
    return parser


def _overview() -> None:
    for name in experiments():
        grid = load(name)
        print(f"{name:<16} {len(grid.runs):>4} runs  {grid.title}")


def act(arguments: argparse.Namespace) -> int:
    """Do what the command line asks for; returns the exit status."""
    if not arguments.experiment:
        _overview()
        return 0
    if arguments.parallel is not None and (arguments.parallel < 1 or not arguments.all):
        raise UserError(f"--parallel: got {arguments.parallel}, expected a number of runs, together with --all")
    grid = load(arguments.experiment, arguments.runs, parse_changes(arguments.set))
    launcher = shlex.split(arguments.launcher)
    if count := launching.number(arguments.ranks):
        if launcher:
            raise UserError(
                f"-n {count} starts the ranks without a launcher: got --launcher, too; leave one of them out"
            )
        grid = replace(grid, runs=[replace(run, ranks=count) for run in grid.runs])
    if arguments.count:
        print(len(grid.runs))
    elif arguments.command is not None:
        print(shlex.join(_pick(grid, arguments.command).command(launcher)))
    elif arguments.index is not None:
        return execute(_pick(grid, arguments.index), launcher)
    elif arguments.all and (arguments.parallel or live.possible()):
        return execute_parallel(grid, launcher, arguments.parallel or 1, live.possible())
    elif arguments.all:
        return execute_all(grid, launcher)
    elif arguments.todo:
        print(compact([i for i, run in enumerate(grid.runs) if not run.finished()]))
    else:
        _print(grid, arguments.status)
    return 0


def _print(grid: Grid, status: bool) -> None:
    print(f"{grid.name}: {grid.title}" + (f" ({grid.paper})" if grid.paper else ""))
    if status:
        runs, now = [progress.measure(run) for run in grid.runs], time.time()
        print(*progress.rows(runs, now), progress.closing_line(runs, now), sep="\n")
        return
    for index, run in enumerate(grid.runs):
        print(f"{index:>4}  {run.directory}")
    print(f"{len(grid.runs)} runs")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return act(_parser().parse_all(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
