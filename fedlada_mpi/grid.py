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
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from .experiments import Experiment, PlannedRun, experiments, live, load, parse_changes, progress, titles
from .experiments.parallel import LOG, Parallel
from .experiments.sequential import execute_all, execute_one
from .experiments.starting import compact
from .settings import Parser
from .support import launcher as launching
from .support.errors import UserError
from .support.processes import reader_may_leave


def _pick(grid: Experiment, index: int) -> PlannedRun:
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
        "--status", action="store_true", help="list the runs with rounds, results, speed and expected end"
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
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="run those again that other code of your own made",
    )
    parser.add_argument(
        "--accept-changed-code",
        action="store_true",
        help="keep those; unfinished ones go on with the new code",
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
    launcher = launching.words(arguments.launcher)
    if count := launching.number(arguments.ranks):
        if launcher:
            raise UserError(
                f"-n {count} starts the ranks without a launcher: got --launcher, too; leave one of them out"
            )
        grid = replace(grid, runs=[replace(run, ranks=count) for run in grid.runs])
    if arguments.overwrite and arguments.accept_changed_code:
        raise UserError("--overwrite and --accept-changed-code contradict each other: give one of them")
    asked = {"overwrite": arguments.overwrite, "accept_changed_code": arguments.accept_changed_code}
    grid = replace(grid, runs=[replace(run, **asked) for run in grid.runs])
    if arguments.all or arguments.index is not None:
        titles.write(grid)
    if arguments.all:
        print(_heading(grid), flush=True)
    if arguments.count:
        print(len(grid.runs))
    elif arguments.command is not None:
        print(shlex.join(_pick(grid, arguments.command).command(launcher)))
    elif arguments.index is not None:
        return execute_one(_pick(grid, arguments.index), launcher)
    elif arguments.all and (arguments.parallel or live.possible()):
        return Parallel(grid.runs, launcher, arguments.parallel or 1, live.possible()).execute()
    elif arguments.all:
        return execute_all(grid.runs, launcher)
    elif arguments.todo:
        print(compact([i for i, run in enumerate(grid.runs) if not run.finished()]))
    else:
        _print(grid, arguments.status)
    return 0


def _heading(grid: Experiment) -> str:
    return grid.name + (f": {grid.title}" if grid.title else "") + (f" ({grid.paper})" if grid.paper else "")


def _print(grid: Experiment, status: bool) -> None:
    print(_heading(grid))
    if status:
        runs, now = [progress.measure(run) for run in grid.runs], time.time()
        print(*progress.rows(runs, now), progress.closing_line(runs, now), sep="\n")
        return
    for index, run in enumerate(grid.runs):
        print(f"{index:>4}  {run.directory}")
    print(f"{len(grid.runs)} runs")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        with reader_may_leave():
            return act(_parser().parse_all(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
