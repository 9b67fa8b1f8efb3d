"""Federated training over MPI.

    python -m fedlada_mpi.run                                        the embedded digits, one process
    python -m fedlada_mpi.run -n 4                                   a server and three silos on this machine
    srun --mpi=pmix -n 11 python -m fedlada_mpi.run --dataset cifar10 --algorithm fedlada
    python -m fedlada_mpi.run --dataset cifar10 --print-config       the settings, and where each comes from
    python -m fedlada_mpi.run --dataset cifar10 --estimate 11        how long it would take on 11 ranks
    python -m fedlada_mpi.run --help-all                             every setting, not only those that most runs change

Exit codes: 0 finished, 2 bad input, 3 diverged (see --on-nonfinite), 4 no answer from other ranks (see --patience), 75
stopped by Ctrl-C, SIGTERM or SIGUSR1 with a checkpoint (--resume goes on).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from .algorithms import resolve
from .data.datasets import ensure
from .rundir import files
from .session.launch import launched
from .session.plan import Request
from .settings import SETTINGS, Parser, add_arguments, grouped, is_record, load
from .support import code_digest, launcher, signals, start_record
from .support.errors import DIVERGED, DivergedError, UserError
from .support.processes import reader_may_leave

# Of the command, in addition to the settings.
OPTIONS = ("config", "resume", "overwrite", "print_config", "estimate", "ranks", "accept_changed_code", "trust")
# What most runs change, which --help lists; --help-all has all settings.
COMMON = (
    *("dataset", "algorithm", "model", "clients", "participation"),
    *("rounds", "local_epochs", "batch_size", "lr", "seed", "device", "out"),
)
HELP_ALL = "--help-all"


class _Parser(Parser):
    def print_help(self, file: Any = None) -> None:
        _print_on_root(self.format_help(), file)


@dataclass(frozen=True)
class Instead:
    """What is to be printed in place of a run."""

    settings: bool = False
    estimate: int | None = None  # for so many ranks; 0: for those that there are

    def __bool__(self) -> bool:
        return self.settings or self.estimate is not None


def parse(argv: Sequence[str] | None) -> tuple[Request, Instead]:
    """What is asked for, and what is to be printed in place of a run of it."""
    parser = _Parser(
        prog="python -m fedlada_mpi.run",
        usage="%(prog)s [options] [settings], listed by --help",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(HELP_ALL, action="help", help="the same with all settings")
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML file, or from a run's config.json")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="continue the run in DIR with its settings; without DIR: that in --out, or start it",
    )
    earlier.add_argument("--overwrite", action="store_true", help="discard a run that is already in --out")
    parser.add_argument(
        "--accept-changed-code", action="store_true", help="with --resume: go on although the user's code has changed"
    )
    parser.add_argument(
        "--trust", action="store_true", help="run code that a run's record names and that you have not run here before"
    )
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--print-config", action="store_true", help="print the settings and where each comes from")
    printed.add_argument(
        "--estimate",
        nargs="?",
        const="",
        metavar="RANKS",
        help="print how long the run will take, what it will move and how much memory it will need, from a few timed "
        "rounds; RANKS: if it had so many ranks like this one process [those that there are]",
    )
    launcher.add_argument(parser)
    _add_settings(parser, argv)
    options = parser.parse_all(argv)
    for name in ("config", "resume"):
        if getattr(options, name) == []:  # what argparse makes of --config=--
            parser.error(f"argument --{name}: expected one argument")
    settings = {name: value for name, value in vars(options).items() if name not in OPTIONS}
    config = _settings_file(options)
    if options.resume:
        settings.setdefault("out", options.resume)
        if Path(settings["out"]).resolve() != Path(options.resume).resolve():
            raise UserError(f"--resume {options.resume} goes on in that directory: leave --out {settings['out']} out")
    # What is not trusted, ``_check_trust`` has refused.
    consent = {"accept_changed_code": options.accept_changed_code, "trust": True}
    instead = Instead(options.print_config, _estimated_ranks(options.estimate))
    return Request(settings, config, options.resume is not None, options.overwrite, **consent), instead


def _estimated_ranks(given: str | None) -> int | None:
    if given is None or given == "":
        return None if given is None else 0
    if not given.isdecimal() or not 1 <= int(given) <= launcher.MOST:
        raise UserError(f"--estimate: got {given!r}, expected a number of ranks from 1 to {launcher.MOST}, or none")
    return int(given)


def _settings_file(options: argparse.Namespace) -> str | None:
    """What is given with --config, or the record of the run that --resume names."""
    if not options.resume:
        return options.config
    out = Path(options.resume)
    if options.config:
        raise UserError(f"--resume {out} takes the settings of that run: leave --config out")
    if not (out / "config.json").is_file():
        raise UserError(f"--resume: got {out}, which holds no run (there is no config.json): expected a run's --out")
    if not files.complete_checkpoints(out):
        raise UserError(f"--resume: {out} has no checkpoint to go on from: start that run again with --overwrite")
    return str(out / "config.json")


def _add_settings(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Options by group, with the values that they have here unless they are given.

    Those of other methods than the chosen one are taken too, and refused with those that it has.
    """
    from .algorithms import built_in_hypers, find, names

    first = Parser(add_help=False)
    chooses = ("algorithm", "dataset", "preset")  # what presets depend on
    for name in chooses:
        first.add_argument(f"--{name}")
    for name in ("model", "task", "augment"):  # which may name a user's code, too
        first.add_argument(f"--{name}")
    first.add_argument("--config")
    first.add_argument("--resume", nargs="?", const="")
    first.add_argument("--trust", action="store_true")
    chosen, _ = first.parse_known_args(argv)
    path = _settings_file(chosen) or None
    file = load(path) if path else {}
    _check_trust(chosen, path, file)
    method = chosen.algorithm or file.get("algorithm")
    method = method if isinstance(method, str) else SETTINGS["algorithm"].default
    hypers, values = find(method).hypers, {}
    with suppress(UserError):  # which is reported when all options are known
        given = {name: value for name, value in vars(chosen).items() if name in chooses and value is not None}
        values = resolve(given, file, recorded=path is not None and is_record(path)).config.record()
    everything = HELP_ALL in (sys.argv[1:] if argv is None else argv)
    common = {} if everything else {name: SETTINGS[name] for name in COMMON}
    if common:
        add_arguments(parser.add_argument_group("settings that most runs change"), common, values=values)
    for title, settings in grouped().items():
        rest = {name: setting for name, setting in settings.items() if name not in common}
        add_arguments(parser.add_argument_group(title), rest, shown=everything, values=values)
    add_arguments(parser.add_argument_group(f"settings of {method}"), hypers, method, values=values)
    more = "" if everything else f"{len(SETTINGS) - len(COMMON)} further settings: {HELP_ALL}\n"
    parser.epilog = f"{more}methods: {', '.join(names())}"
    taken = {*hypers, *(name.removeprefix("no_") for name in hypers)}
    others = {name: setting for name, setting in built_in_hypers().items() if name not in taken}
    add_arguments(parser, others, shown=False)


def _check_trust(chosen: argparse.Namespace, path: str | None, file: Mapping[str, Any]) -> None:
    """Before any rank imports code that a record names; the root decides, as others may have another home."""
    given = {name: getattr(chosen, name) for name in code_digest.SETTINGS if getattr(chosen, name) is not None}
    request = Request(given, path, bool(chosen.resume), trust=chosen.trust)
    if launcher.launched_processes() > 1 and code_digest.named(request.of_record(file)):
        from .mpi import World

        with World() as world:
            world.on_root(lambda: request.check_trust(file))
    else:
        request.check_trust(file)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        count, argv = launcher.to_start(argv)
        if count:
            return _start_ranks(count, argv)
    except UserError as error:
        return _ended_by(error)
    # Before torch and MPI are imported: a signal in those seconds must not kill the process.
    with signals.handled(interrupt=True):
        try:
            request, instead = parse(argv)
            if instead:
                return _print(request, instead)
            with launched(request) as ended:
                return signals.STOPPED if ended.status == "stopped" else 0
        except (UserError, DivergedError) as error:
            return _ended_by(error)


def _start_ranks(count: int, argv: Sequence[str]) -> int:
    """What is refused is reported once, before the ranks start."""
    try:
        request, instead = parse(argv)
        if instead.settings:
            return _print(request, instead)
        if instead.estimate:
            raise UserError(f"--estimate {instead.estimate} is for one process: leave the number, or -n {count}, out")
        if not request.silo_dir:  # which its ranks alone open, and which settings depend on
            resolved, directory = request.resolve()
            config = resolved.config
            ensure(config, directory, count - (not config.server_trains), print)
        return launcher.start("fedlada_mpi.run", count, argv)
    except KeyboardInterrupt:  # before they have started
        return 128 + signal.SIGINT


def _print(request: Request, instead: Instead) -> int:
    if instead.settings:
        _print_on_root(request.resolve()[0].table())
    else:
        from .session.estimate import estimate

        found = estimate(request, instead.estimate or 0)
        if found is not None:
            _print_on_root(str(found))
    return 0


def _ended_by(error: UserError | DivergedError) -> int:
    _print_on_root(f"error: {error}", sys.stderr)
    return 2 if isinstance(error, UserError) else DIVERGED


def _print_on_root(text: str, stream: TextIO | None = None) -> None:
    with suppress(UserError):  # without MPI there is nobody else
        from .mpi import is_root

        if not is_root():
            return
    with reader_may_leave():
        print(text, file=stream, flush=True)


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: ``main``, and the end of this process."""
    code = main(argv)
    start_record.report_end(code)
    if signals.tolerant():
        # MPI_Finalize may wait for ranks that are lost, or have left.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    command()
