"""Federated training over MPI.

    python -m fedlada_mpi.run                                        the embedded digits, one process
    mpirun -n 4 python -m fedlada_mpi.run                            a server and three silos
    srun --mpi=pmix -n 11 python -m fedlada_mpi.run --dataset cifar10 --algorithm fedlada
    python -m fedlada_mpi.run --dataset cifar10 --print-config       the settings, and where each comes from

Exit codes: 0 finished, 2 bad input, 3 diverged (see --on-nonfinite), 4 no answer from other ranks (see --patience), 75
stopped by SIGTERM or SIGUSR1 with a checkpoint (--resume goes on).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

from . import signals
from .config import SETTINGS, add_arguments, load
from .errors import DIVERGED, DivergedError, UserError
from .launch import Request, launched

OPTIONS = ("config", "resume", "overwrite", "print_config")  # of the command, in addition to the settings


def parse(argv: Sequence[str] | None) -> tuple[Request, bool]:
    """What is asked for, and whether only the settings are to be printed."""
    parser = argparse.ArgumentParser(
        prog="python -m fedlada_mpi.run",
        usage="%(prog)s [options] [settings], listed by --help",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML file, or from a run's config.json")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    earlier.add_argument("--overwrite", action="store_true", help="discard a run that is already in --out")
    parser.add_argument("--print-config", action="store_true", help="print the settings and where each comes from")
    add_arguments(parser.add_argument_group("settings"), SETTINGS)
    _add_hypers(parser, argv)
    options = parser.parse_args(argv)
    if options.config == []:  # what argparse makes of --config=--
        parser.error("argument --config: expected one argument")
    settings = {name: value for name, value in vars(options).items() if name not in OPTIONS}
    return Request(settings, options.config, options.resume, options.overwrite), options.print_config


def _add_hypers(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    """Options of the chosen method; those of other methods are taken too, and refused with those that it has."""
    from .algorithms import built_in_hypers, find

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--algorithm")
    first.add_argument("--config")
    chosen, _ = first.parse_known_args(argv)
    name = chosen.algorithm or (load(chosen.config).get("algorithm") if chosen.config else None)
    name = name if isinstance(name, str) else SETTINGS["algorithm"].default
    hypers = find(name).hypers
    add_arguments(parser.add_argument_group(f"settings of {name}"), hypers)
    others = {n: setting for n, setting in built_in_hypers().items() if n not in hypers}
    add_arguments(parser, others, shown=False)


def main(argv: Sequence[str] | None = None) -> int:
    # Before torch and MPI are imported: a signal in those seconds must not kill the process.
    with signals.handled():
        try:
            request, print_only = parse(argv)
            if print_only:
                _print_on_root(request.settle()[0].table())
                return 0
            with launched(request) as ended:
                return signals.STOPPED if ended.status == "stopped" else 0
        except (UserError, DivergedError) as error:
            _print_on_root(f"error: {error}", sys.stderr)
            return 2 if isinstance(error, UserError) else DIVERGED


def _print_on_root(text: str, stream: TextIO | None = None) -> None:
    from .mpi import is_root

    if is_root():
        print(text, file=stream)


if __name__ == "__main__":
    sys.exit(main())
