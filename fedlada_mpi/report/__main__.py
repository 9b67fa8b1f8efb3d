"""The command line of the report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..settings import Parser
from ..support.errors import UserError, printable
from . import __doc__ as description
from . import build
from .pack import pack


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m fedlada_mpi.report", description=description.partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run directories, or directories that hold them")
    parser.add_argument("--out", default="report", metavar="DIR", help="where the report goes [report]")
    parser.add_argument("--pack", metavar="DIR", help="write small records of the runs into DIR instead of a report")
    parser.add_argument(
        "--update", nargs="+", default=(), metavar="PAGE.md", help="pages to put the report's tables and pictures into"
    )
    parser.add_argument(
        "--style",
        choices=("screen", "paper"),
        default="screen",
        help="figures for a screen, or for a paper: as wide as a journal's column or text, also as PDF, with LaTeX "
        "captions [screen]",
    )
    parser.add_argument(
        "--skip-broken",
        action="store_true",
        help="leave out runs that cannot be read, and name them, instead of ending",
    )
    try:
        arguments = parser.parse_all(argv)
        if arguments.pack is None:
            messages = build(arguments.runs, arguments.out, arguments.update, arguments.style, arguments.skip_broken)
        else:
            messages = pack(arguments.runs, arguments.pack, arguments.skip_broken)
        print(*messages, sep="\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # A write that fails, as on a full disk, does not name its file.
        where, option = (arguments.out, "--out") if arguments.pack is None else (arguments.pack, "--pack")
        path = printable(str(error.filename or where))
        print(f"error: cannot write {path}: {error.strerror}: give another directory with {option}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: run it again, a report may be half written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
