"""Federated training over MPI.

    python -m fedlada_mpi.run                                        the embedded digits, one process
    mpirun -n 4 python -m fedlada_mpi.run                            a server and three silos
    srun --mpi=pmix -n 11 python -m fedlada_mpi.run --dataset cifar10 --algorithm fedlada
    python -m fedlada_mpi.run --dataset cifar10 --print-config       the settings, and where each comes from

Exit codes: 0 finished, 2 bad input, 75 stopped by SIGTERM or SIGUSR1 with a checkpoint (--resume goes on).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import signals
from .config import add_arguments, load
from .errors import UserError


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict]:
    parser = argparse.ArgumentParser(
        prog="python -m fedlada_mpi.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML or JSON file")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    earlier.add_argument("--overwrite", action="store_true", help="discard a run that is already in --out")
    parser.add_argument("--print-config", action="store_true", help="print the settings and where each comes from")
    add_arguments(parser.add_argument_group("settings"))
    options = parser.parse_args(argv)
    mine = ("config", "resume", "overwrite", "print_config")
    return options, {name: value for name, value in vars(options).items() if name not in mine}


def main(argv: Sequence[str] | None = None) -> int:
    with signals.handled():
        options, flags = parse(argv)
        return _main(options, flags)


def _main(options: argparse.Namespace, flags: dict) -> int:
    try:
        if options.print_config:
            table = _settle(options, flags)[0].table()
            if _speaks():
                print(table)
            return 0
        return _run(options, flags)
    except UserError as error:
        if _speaks():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _settle(options: argparse.Namespace, flags: dict):
    from .data import settle

    return settle(flags, load(options.config) if options.config else {})


def _speaks() -> bool:
    from .mpi import first_to_speak

    return first_to_speak()


def _run(options: argparse.Namespace, flags: dict) -> int:
    from .mpi import World

    world = World()
    from pathlib import Path

    from . import outputs
    from .config import Config
    from .session import Session

    def settings() -> dict:
        resolved, directory = _settle(options, flags)
        start = outputs.claim(resolved.config, options.resume, options.overwrite)
        return {"config": vars(resolved.config), "directory": str(directory), "start": start}

    told = world.tell(world.alone(settings))
    config, start = Config(**told["config"]), told["start"]
    if start == outputs.FINISHED:
        world.close()
        return 0
    session = Session(world, config, Path(told["directory"]))
    status = session.run(start)
    session.close()
    return signals.STOPPED if status == "stopped" else 0


if __name__ == "__main__":
    sys.exit(main())
