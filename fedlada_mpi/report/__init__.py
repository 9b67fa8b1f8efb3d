"""The report of any number of runs: tables compared with the paper's, figures, and one HTML page.

    python -m fedlada_mpi.report runs/main --out report

Runs may still be in progress. See docs/experiments.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..support.errors import printable
from ..support.inputs import check_path

if TYPE_CHECKING:
    from .groups import Group
    from .tables import Table


def build(
    runs: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    pages: Sequence[str | os.PathLike] = (),
    style: str = "screen",
    skip_broken: bool = False,
) -> list[str]:
    """Write the report of the run directories at or under ``runs``; returns messages for the user.

    ``pages`` are Markdown files that get its tables and pictures, see ``markdown.py``; ``style`` is that of
    the figures, "screen" or "paper"; ``skip_broken`` leaves out runs that cannot be read.
    """
    from . import figures, latex, load, markdown, page, paper
    from .groups import group

    check_path(os.fspath(out), "--out")
    for one in pages:
        markdown.read(one)  # a page that cannot be read is reported before everything else is computed
    out = Path(out)
    loaded, problems = load.read_all(runs, skip_broken)
    groups = group(loaded)
    all_tables = tables_of(groups)
    (out / "tables").mkdir(parents=True, exist_ok=True)
    for table in all_tables:
        (out / "tables" / f"{table.id}.csv").write_text(table.csv(), "utf-8")
        (out / "tables" / f"{table.id}.md").write_text(table.markdown(), "utf-8")
        (out / "tables" / f"{table.id}.tex").write_text(latex.table(table), "utf-8")
    names = figures.write(groups, out / "figures", style)
    where = printable(", ".join(map(str, runs)))
    problems = [printable(problem) for problem in problems]
    text = page.render(groups, all_tables, names, where, problems, figures.STYLES[style].formats)
    (out / "index.html").write_text(text, "utf-8")
    markdown.update(pages, all_tables, paper.figures(groups), out / "figures")
    unreadable = sum(run.skipped for run in loaded)
    messages = [f"left out: {problem}" for problem in problems]
    if unreadable:
        messages.append(f"{unreadable} unreadable lines in metrics.jsonl were left out")
    if not page.plotly():
        messages.append('curves are static pictures: for interactive ones, pip install "fedlada_mpi[report]"')
    counts = [(len(loaded), "run"), (len(groups), "setting"), (len(all_tables), "table"), (len(names), "figure")]
    count, settings, *files = (f"{n} {name}{'' if n == 1 else 's'}" for n, name in counts)
    return [*messages, f"{count} of {settings}, {', '.join(files)}: {printable(str(out / 'index.html'))}"]


def tables_of(groups: Sequence[Group]) -> list[Table]:
    """All tables of a report: the paper's, then those of the runs themselves."""
    from . import claims, paper, setups, significance, speedup, tables, tuning

    return [
        *claims.tables(groups),
        *paper.tables(groups),
        tables.overview(groups),
        *significance.tables(groups),
        *(table for table in [tuning.table(groups), tables.clients(groups), tables.silos(groups)] if table.rows),
        *(table for table in [tables.diagnostics(groups)] if table.rows),
        *speedup.tables(groups),
        *tables.targets(groups, tables.levels(groups, paper.levels())),
        tables.cost(groups),
        tables.phases(groups),
        *setups.tables(groups),
        tables.runs(groups),
    ]
