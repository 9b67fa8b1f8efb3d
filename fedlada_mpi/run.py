"""Federated training over MPI.

    python -m fedlada_mpi.run                                        the embedded digits, one process
    python -m fedlada_mpi.run -n 4                                   a server and three silos on this machine
    srun --mpi=pmix -n 11 python -m fedlada_mpi.run --dataset cifar10 --algorithm fedlada
    python -m fedlada_mpi.run --dataset cifar10 --print-config       the settings, and where each comes from

Exit codes: 0 finished, 2 bad input, 3 diverged (see --on-nonfinite), 4 no answer from other ranks (see --patience), 75
stopped by Ctrl-C, SIGTERM or SIGUSR1 with a checkpoint (--resume goes on).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from .algorithms import resolve
from .data.datasets import ensure
from .rundir import files, results
from .session.launch import launched
from .session.plan import Request
from .settings import SETTINGS, Parser, add_arguments, grouped, is_record, load
from .support import launcher, signals
from .support.errors import DIVERGED, DivergedError, UserError

# Of the command, in addition to the settings.
OPTIONS = ("config", "resume", "overwrite", "print_config", "ranks")


class _Parser(Parser):
    def print_help(self, file: Any = None) -> None:
        _print_on_root(self.format_help(), file)


def parse(argv: Sequence[str] | None) -> tuple[Request, bool]:
    """What is asked for, and whether only the settings are to be printed."""
    parser = _Parser(
        prog="python -m fedlada_mpi.run",
        usage="%(prog)s [options] [settings], listed by --help",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    parser.add_argument("--print-config", action="store_true", help="print the settings and where each comes from")
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
    return Request(settings, config, options.resume is not None, options.overwrite), options.print_config


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

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooses = ("algorithm", "dataset", "preset")  # what presets depend on
    for name in chooses:
        first.add_argument(f"--{name}")
    first.add_argument("--config")
    first.add_argument("--resume", nargs="?", const="")
    chosen, _ = first.parse_known_args(argv)
    path = _settings_file(chosen) or None
    file = load(path) if path else {}
    method = chosen.algorithm or file.get("algorithm")
    method = method if isinstance(method, str) else SETTINGS["algorithm"].default
    hypers, values = find(method).hypers, {}
    with suppress(UserError):  # which is reported when all options are known
        given = {name: value for name, value in vars(chosen).items() if name in chooses and value is not None}
        values = resolve(given, file, recorded=path is not None and is_record(path)).config.record()
    for title, settings in grouped().items():
        add_arguments(parser.add_argument_group(title), settings, values=values)
    add_arguments(parser.add_argument_group(f"settings of {method}"), hypers, method, values=values)
    parser.epilog = f"methods: {', '.join(names())}"
    taken = {*hypers, *(name.removeprefix("no_") for name in hypers)}
    others = {name: setting for name, setting in built_in_hypers().items() if name not in taken}
    add_arguments(parser, others, shown=False)


def main(argv: Sequence[str] | None = None) -> int:
    # Before torch and MPI are imported: a signal in those seconds must not kill the process.
    with signals.handled(interrupt=True):
        try:
            count, argv = launcher.to_start(argv)
            request, print_only = parse(argv)
            if print_only:
                _print_on_root(request.resolve()[0].table())
                return 0
            if count:
                # What is refused is reported once, before the ranks start.
                resolved, directory = request.resolve()
                config = resolved.config
                ensure(config, directory, count - (not config.server_trains), print)
                code = launcher.start("fedlada_mpi.run", count, argv)
                if code == 0 and results.finished(Path(config.out)) is None:
                    # The launcher says 0 also where all ranks were killed.
                    raise UserError(f"all ranks were lost: --resume {config.out} goes on from the last checkpoint")
                return code
            with launched(request) as ended:
                return signals.STOPPED if ended.status == "stopped" else 0
        except (UserError, DivergedError) as error:
            _print_on_root(f"error: {error}", sys.stderr)
            return 2 if isinstance(error, UserError) else DIVERGED


def _print_on_root(text: str, stream: TextIO | None = None) -> None:
    from .mpi import is_root

    if is_root():
        print(text, file=stream)


def command(argv: Sequence[str] | None = None) -> NoReturn:
    """The command: ``main``, and the end of this process."""
    code = main(argv)
    if signals.tolerant():
        # MPI_Finalize may wait for ranks that are lost, or have left.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    command()
