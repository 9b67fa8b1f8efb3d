"""Check this machine and installation, line by line: what works, what is missing, how to fix it.

    python -m fedlada_mpi.doctor
    mpirun -n 4 python -m fedlada_mpi.doctor
    srun -n 4 --mpi=pmix python -m fedlada_mpi.doctor --json doctor.json

A warning is something that works, but not as well as it could. Exit codes: 0 nothing failed on any rank, 1
something failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..settings import Parser
from ..support.errors import UserError
from ..support.version import __version__
from . import installation, machine  # noqa: F401  (they register their checks, in the order of the report)
from .check import CHECKS, FAIL, OK, SKIP, WARN, Check, Here

PATIENCE = 120  # seconds for one check, after which some rank must be missing
GRACE = 3.0  # seconds for the root to finish its report: launchers end all ranks when one has failed
ONE_ENVIRONMENT = "use one environment, the same on all machines"
# Before MPI has started, only the launcher's variables distinguish ranks; SLURM's last, as mpirun may run under it.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID")
SAME_EVERYWHERE = ("python", "packages", "MPI", "torch", "torchvision")


class Row(NamedTuple):
    """A line of the report: the check, its status, what it found and what to do about it."""

    name: str
    status: str
    found: str
    do: str = ""

    def __str__(self) -> str:
        return f"  {self.status:<4}  {self.name:<11}  {self.found}" + (f"\n{'':21}-> {self.do}" if self.do else "")


def examine(here: Here, check: Check, before: Sequence[Row] = ()) -> Row:
    """Run one check; whatever it raises becomes its row."""
    missing = [row.name for row in before if row.name in check.needs.split() and row.status in (FAIL, SKIP)]
    if missing:
        return Row(check.name, SKIP, f"it needs {missing[0]}")
    try:
        return Row(check.name, *check.examine(here))
    except UserError as error:
        return Row(check.name, FAIL, str(error), check.fix)
    except Exception as error:
        line = next(filter(None, map(str.strip, str(error).splitlines())), "")
        return Row(check.name, FAIL, f"{type(error).__name__}: {line}", check.fix)


def elsewhere(mine: Sequence[Row], everyone: Sequence[tuple[str, Sequence[Row]]]) -> list[Row]:
    """What other ranks found and this one did not: warnings and failures, and versions that differ."""
    seen: dict[Row, list[str]] = {}
    for rank, (host, rows) in enumerate(everyone):
        # Ranks with another version of this package may have other checks.
        for here, there in zip(mine, rows, strict=False):
            if there.status in (WARN, FAIL) and there.status != here.status:
                seen.setdefault(there, []).append(f"{rank} on {host}")
            elif here.name in SAME_EVERYWHERE and there.status == OK and there.found != here.found:
                row = Row(here.name, WARN, there.found, ONE_ENVIRONMENT)
                seen.setdefault(row, []).append(f"{rank} on {host}")
    return [row._replace(found=f"rank {', '.join(where)}: {row.found}") for row, where in seen.items()]


def report(out: Path, root: bool) -> tuple[list[Row], list[tuple[str, list[Row]]]]:
    """Run all checks; the root prints each row. Returns the rows that count, and every rank's host and rows."""

    def show(line: object) -> None:
        if root:
            print(line, flush=True)

    here, host = Here(out), platform.node()
    rows: list[Row] = []
    show(f"fedlada_mpi {__version__} on {host}\n")
    for check in CHECKS:
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.__stderr__ or sys.stderr)
        rows.append(examine(here, check, rows))
        show(rows[-1])
    gathered: list[Any] = [[host, rows]]
    if here.world is not None:
        gathered = here.world.allgather_json([host, rows])
        here.world.close()
    faulthandler.cancel_dump_traceback_later()
    everyone = [(name, [Row(*row) for row in theirs]) for name, theirs in gathered]
    others = elsewhere(rows, everyone)
    for row in others:
        show(row)
    return rows + others, everyone


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m fedlada_mpi.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write what every rank found to this file")
    parser.add_argument("--out", metavar="DIR", type=Path, default="runs", help="where runs will be written [runs]")
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    try:
        options = parser.parse_all(argv)
    except UserError as error:
        if rank == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    rows, everyone = report(options.out, root=rank == "0")
    failed, warnings = (sum(row.status == status for row in rows) for status in (FAIL, WARN))
    if rank == "0":
        print(f"\n{failed or 'nothing'} failed, {warnings or 'no'} warning{'s'[: warnings != 1]}", flush=True)
        if options.json:
            ranks = [{"host": host, "rows": [row._asdict() for row in theirs]} for host, theirs in everyone]
            content = {"version": __version__, "failed": failed, "warnings": warnings, "ranks": ranks}
            try:
                options.json.write_text(json.dumps(content, indent=2) + "\n")
            except OSError as error:
                print(f"error: --json: cannot write {options.json}: {error.strerror}", file=sys.stderr)
                return 2
    elif len(everyone) == 1 and failed:
        # MPI did not bring this rank's rows to the root.
        for row in rows:
            if row.name in SAME_EVERYWHERE and row.status == FAIL:
                print(f"rank {rank} on {platform.node()}:{row}", file=sys.stderr, flush=True)
        time.sleep(GRACE)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
