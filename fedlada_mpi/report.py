"""The report of any number of runs: tables compared with the paper's, figures, and one HTML page.

    python -m fedlada_mpi.report runs/main --out report

Runs may still be in progress. See docs/experiments.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .settings import Parser
from .support.errors import UserError, printable
from .support.inputs import check_path

if TYPE_CHECKING:
    from .analysis.groups import Group
    from .analysis.tables import Table


def build(
    runs: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    pages: Sequence[str | os.PathLike] = (),
    style: str = "screen",
    skip_broken: bool = False,
) -> list[str]:
    """Write the report of the run directories at or under ``runs``; returns messages for the user.

    ``pages`` are Markdown files that get its tables and pictures, see ``reproduction/markdown.py``; ``style`` is that
    of the figures, "screen" or "paper"; ``skip_broken`` leaves out runs that cannot be read.
    """
    from .analysis import drawing, figures, load, page
    from .analysis.groups import group
    from .reproduction import figures as paper_figures
    from .reproduction import markdown
    from .reproduction.section import sections

    check_path(os.fspath(out), "--out")
    for one in pages:
        markdown.read(one)  # a page that cannot be read is reported before everything else is computed
    out = Path(out)
    loaded, problems = load.read_all(runs, skip_broken)
    problems = [printable(problem) for problem in problems]
    groups = group(loaded)
    tables, of_paper = tables_of(groups), paper_figures.figures(groups)
    written = [table for table in tables if not (table.paper and table.empty)]  # other studies have no paper's tables
    page.write_tables(written, out / "tables")
    drawn = drawing.write([*figures.plan(groups), *paper_figures.plan(of_paper, groups)], out / "figures", style)
    formats, interactive = drawing.STYLES[style].formats, bool(page.plotly())
    text = page.render(
        groups,
        written,
        drawn,
        printable(", ".join(map(str, runs))),
        problems,
        formats,
        sections(tables, of_paper, formats, interactive),
        {figure.id: figure.panels for figure in of_paper if not figure.empty},
        load.title(loaded),
    )
    (out / "index.html").write_text(text, "utf-8")
    markdown.update(pages, tables, of_paper, out / "figures")
    unreadable = sum(run.skipped for run in loaded)
    messages = [f"left out: {problem}" for problem in problems]
    if unreadable:
        messages.append(f"{unreadable} unreadable lines in metrics.jsonl were left out")
    if not interactive:
        messages.append('curves are static pictures: for interactive ones, pip install "fedlada_mpi[report]"')
    counts = [(len(loaded), "run"), (len(groups), "setting"), (len(written), "table"), (len(drawn), "figure")]
    count, settings, *files = (f"{n} {name}{'' if n == 1 else 's'}" for n, name in counts)
    return [*messages, f"{count} of {settings}, {', '.join(files)}: {printable(str(out / 'index.html'))}"]


def tables_of(groups: Sequence[Group]) -> list[Table]:
    """All tables of a report: those of the runs themselves, then the paper's."""
    from . import reproduction
    from .analysis import client_tables, run_tables, setups, significance, sweeps
    from .reproduction import paper

    return [
        *run_tables.overview(groups),
        *run_tables.results(groups),
        *significance.tables(groups),
        *sweeps.tables(groups),
        *client_tables.tables(groups),
        *(one for one in [run_tables.diagnostics(groups)] if one.rows),
        *run_tables.targets(groups, run_tables.levels(groups, paper.levels())),
        run_tables.cost(groups),
        run_tables.phases(groups),
        *setups.tables(groups),
        *run_tables.runs(groups),
        *reproduction.tables(groups),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m fedlada_mpi.report", description=__doc__.partition("\n")[0])
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
            from .analysis.pack import pack

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
