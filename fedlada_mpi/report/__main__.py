"""The command line of the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import UserError
from . import __doc__ as description
from . import build


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fedlada_mpi.report", description=description.partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or directories that hold them")
    parser.add_argument("--out", default="report", metavar="DIR", help="where the report goes [report]")
    arguments = parser.parse_args(argv)
    try:
        for line in build(arguments.runs, arguments.out):
            print(line)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: cannot write {error.filename}: {error.strerror}: give another directory with --out",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
