"""Choose settings: grid search, random search or successive halving on validation data; then the test set, once.

    python -m fedlada_mpi.tune                                   # list the plans that come with the package
    python -m fedlada_mpi.tune plan.toml                         # the whole search; the same command goes on with it
    python -m fedlada_mpi.tune plan.toml --parallel 4            # four runs at once on this machine
    python -m fedlada_mpi.tune plan.toml --status                # its trials, and what became of them
    python -m fedlada_mpi.tune plan.toml --todo                  # what is left, as arrays: a line STAGE INDICES each
    python -m fedlada_mpi.tune plan.toml --stage 0 --index 7     # one run, as an element of an array
    python -m fedlada_mpi.tune plan.toml --page                  # tune.html and the winners' settings so far

Exit codes: 0 finished, 2 bad input, 3 no trial of some method has a score, 75 stopped by a signal with checkpoints.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .experiments.starting import compact
from .rundir import lock
from .settings import Parser
from .support import launcher as launching
from .support.errors import DIVERGED, UserError, shortened
from .support.processes import reader_may_leave
from .tuning import results, running
from .tuning.plan import TunePlan, load, parse_plan, plans
from .tuning.search import Search, State, Winner


@dataclass(frozen=True)
class Tuned:
    """What ``fedlada_mpi.tune`` returns.

    ``winners``: by method, with ``settings``, ``score``, ``tests`` by seed, their ``mean`` and ``std``. ``configs``: by
    method, the file of its settings, which ``train(config=...)`` takes. ``page``: the page of the search.
    """

    winners: dict[str, Winner]
    configs: dict[str, Path]
    page: Path


def tune(
    plan: str | os.PathLike[str] | Mapping[str, Any],
    *,
    out: str | os.PathLike[str] | None = None,
    parallel: int = 1,
    ranks: int | None = None,
    launcher: Sequence[str] = (),
    accept_changed_code: bool = False,
    quiet: bool = False,
) -> Tuned:
    """Search as ``python -m fedlada_mpi.tune`` does; a search that is there already is gone on with.

    ``plan``: a file, or the content of one as a dictionary, which needs ``out``. ``parallel``: runs at once.
    ``ranks``: of each run. ``launcher``: the words of a command that starts ranks. Raises ``UserError`` for what a user
    can fix, and ``KeyboardInterrupt`` where a signal has stopped it.
    """
    _refuse_ranks()
    if type(parallel) is not int or parallel < 1:
        raise UserError(f"parallel: got {shortened(parallel)}, expected a number of runs, at least 1")
    if isinstance(launcher, str):
        raise UserError(f"launcher: got {shortened(launcher)}, expected a list of its words, such as ['srun', '-n4']")
    ranks = None if ranks is None else launching.number(str(ranks))
    if threading.current_thread() is not threading.main_thread():
        raise UserError("tune: call it in the main thread, the only one that handles signals")
    if isinstance(plan, Mapping):
        if out is None:
            raise UserError("tune: a plan that is no file needs out=DIRECTORY")
        loaded = parse_plan(_plain(plan), Path(out).name, Path(out))
    else:
        loaded = load(plan, os.fspath(out or ""))
    say = (lambda _: None) if quiet else print
    search = Search(loaded, running.at_once(parallel, launcher, ranks, quiet), accept_changed_code, say)
    status = search.run()
    if status == 1:
        raise UserError(
            "runs were made with other code than now: accept_changed_code=True keeps them, another out= not"
        )
    if status not in (0, DIVERGED):
        raise KeyboardInterrupt(f"the search was stopped with status {status}: the same call goes on")
    state, page = _finish(search)
    return Tuned(state.winners, {m: results.settings_file(loaded, m) for m in state.winners}, page)


def _plain(value: Any) -> Any:
    """The content of a plan as a file has it: lists and Python's numbers in place of tuples and numpy's."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _refuse_ranks() -> None:
    if (count := launching.launched_processes()) > 1:
        raise UserError(
            f"a search starts its runs itself: got {count} processes of it, expected one; -n RANKS or --launcher "
            "starts the ranks of each run"
        )


def _parser() -> Parser:
    parser = Parser(
        prog="python -m fedlada_mpi.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("plan", nargs="?", help="a TOML file, or the name of a plan that comes with the package")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="list the trials with their rounds and scores")
    what.add_argument("--todo", action="store_true", help="print stages and the numbers of their unfinished runs")
    what.add_argument("--index", type=int, metavar="I", help="run number I of --stage, from 0")
    what.add_argument("--page", action="store_true", help="write the page and the winners' settings; start nothing")
    parser.add_argument(
        "--stage", type=int, metavar="K", help="with --index: the stage, counted from 0; the last is the winners' runs"
    )
    parser.add_argument("--parallel", type=int, metavar="N", help="N runs at once; on a GPU they share it by MPS")
    parser.add_argument("--out", default="", metavar="DIR", help="where everything is written [runs/PLAN]")
    parser.add_argument(
        "--launcher",
        default=os.environ.get("FEDLADA_LAUNCHER", ""),
        metavar="COMMAND",
        help='what starts the ranks, such as "srun --mpi=pmix" [$FEDLADA_LAUNCHER, else one rank]',
    )
    parser.add_argument("--retry-failed", action="store_true", help="start trials again that failed but not diverged")
    parser.add_argument("--accept-changed-code", action="store_true", help="go on although your own code has changed")
    launching.add_argument(parser)
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Do what the command line asks for; returns the exit status."""
    if not arguments.plan:
        for name in plans():
            print(f"{name:<16} {load(name).title}")
        return 0
    if arguments.parallel is not None and (arguments.parallel < 1 or arguments.index is not None):
        raise UserError(f"--parallel: got {arguments.parallel}, expected a number of runs, without --index")
    if (arguments.stage is None) != (arguments.index is None):
        raise UserError("--stage and --index belong together: give both, as --todo prints them")
    if arguments.retry_failed and (arguments.status or arguments.page or arguments.index is not None):
        raise UserError(
            "--retry-failed is for the whole search, or for --todo, which then lists what failed: leave it out"
        )
    _refuse_ranks()
    launcher, ranks = launching.words(arguments.launcher), launching.number(arguments.ranks)
    if ranks and launcher:
        raise UserError(f"-n {ranks} starts the ranks without a launcher: got --launcher, too; leave one of them out")
    plan = load(arguments.plan, arguments.out)
    one = arguments.index is not None
    runner = running.in_place(launcher, ranks) if one else running.at_once(arguments.parallel or 1, launcher, ranks)
    search = Search(plan, runner, arguments.accept_changed_code)
    if arguments.status:
        _print_status(plan, search.state())
    elif arguments.todo:
        if arguments.retry_failed:
            search.retry_failed()
        for stage, indices in search.todo():
            print(stage, compact(indices))
    elif arguments.page:
        with suppress(lock.Busy):  # a search that is at work notes by itself what it finds
            search.note(wait=0)
        print(_finish(search)[1])
    elif one:
        return search.run_one(arguments.stage, arguments.index)
    else:
        return _run(search, arguments.retry_failed)
    return 0


def _run(search: Search, retry_failed: bool) -> int:
    plan = search.plan
    print(plan.name + (f": {plan.title}" if plan.title else ""), flush=True)
    if retry_failed:
        print(f"{search.retry_failed()} failed runs are started again", flush=True)
    if (status := search.run()) in (0, DIVERGED):
        state, page = _finish(search)
        print(*results.closing_lines(plan, state), f"page: {page}", sep="\n")
    return status


def _finish(search: Search) -> tuple[State, Path]:
    """Write the winners' settings, if they are known, and the page."""
    from .tuning import page

    state = search.state()
    results.write_settings(search.plan, state)
    return state, page.write(search.plan, state)


def _print_status(plan: TunePlan, state: State) -> None:
    print(*results.status_rows(plan, state), sep="\n")
    left = len(state.todo())
    print("finished" if state.finished else f"stage {state.stage + 1} of {plan.stages}: {left} runs to go")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        with reader_may_leave():
            return act(_parser().parse_all(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # between two stages; runs at work are asked to stop with a checkpoint
        print("interrupted: the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT


class _Callable(ModuleType):
    """``fedlada_mpi.tune`` is the function in Python and, once it is imported, this module: it is both."""

    __call__ = staticmethod(tune)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main())
