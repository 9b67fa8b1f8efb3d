"""Tables and pictures of a report in pages written by hand, so that the pages cannot drift from the runs.

A page has a table between two comments, by the table's id:

    <!-- report: headline -->
    <!-- end -->

a picture by the name that the report gives it, in any folder: ![text](folder/paper_all_methods.png); and with
``<!-- report: figures folder -->`` all other figures of the paper, as far as there are runs for them. A note that
several tables have is under the first of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from PIL import Image

from ..analysis.tables import MISSING, NOT_RUN, Cell, Column, Table, markdown_rows
from ..rundir.files import write_atomically
from ..support.errors import UserError
from ..support.inputs import check_path, read_bytes, reason
from ..support.suggestions import did_you_mean
from .figures import Figure
from .paper import TUNED

_BLOCK = re.compile(r"(<!-- report: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_PICTURE = re.compile(r"!\[[^]]*\]\(([^)\s]+/)?([^)/\s]+)\.png\)")
COLOURS = 128  # of a picture in a page, which makes it a third as large


def read(page: str | os.PathLike) -> str:
    """The text of a page."""
    check_path(os.fspath(page), "--update")
    try:
        return read_bytes(Path(page)).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not text"
        raise UserError(f"--update: {page} cannot be read: {why}") from None


def update(
    pages: Sequence[str | os.PathLike], tables: Sequence[Table], figures: Sequence[Figure], pictures: Path
) -> None:
    """Put the tables and pictures of a report into pages that have a place for them; ``pictures`` is their folder."""
    for page in map(Path, pages):
        text = filled(read(page), tables, figures)
        write_atomically(page, text)
        for folder, name in _PICTURE.findall(text):
            if (pictures / f"{name}.png").is_file():
                with Image.open(pictures / f"{name}.png") as picture:
                    small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                small.save(page.parent / folder / f"{name}.png", optimize=True)


def filled(text: str, tables: Sequence[Table], figures: Sequence[Figure]) -> str:
    """The page with the present tables and figures in their places."""
    known = {table.id: table for table in tables}
    by_hand = {name for _, name in _PICTURE.findall(_BLOCK.sub("", text))}
    others = [figure for figure in figures if figure.name not in by_hand]
    above: set[str] = set()

    def block(match: re.Match[str]) -> str:
        what, _, folder = match[2].partition(" ")
        content = _figures(others, folder) if what == "figures" else _table(match[2], known, above)
        return f"{match[1]}\n{content}\n{match[3]}"

    return _BLOCK.sub(block, text)


def _table(name: str, known: Mapping[str, Table], above: set[str]) -> str:
    """The table, without those of its notes that the page has ``above``, to which its own are added."""
    if name in known:
        text = compact(known[name], above)
        above.update(known[name].notes)
        return text
    if name.removesuffix(f"_{TUNED}") in known:  # a table that there are no tuned runs for
        return f"{NOT_RUN.capitalize()}.\n"
    raise UserError(f"--update: got the table {name!r}{did_you_mean(name, known)}, expected one of {', '.join(known)}")


def _figures(figures: Sequence[Figure], folder: str) -> str:
    """The figures that there are runs to compare for, then the names of the others."""
    text, others = "", ""
    for figure in figures:
        if any(len(panel.series) > 1 for panel in figure.panels):
            text += f"{figure.title} ({figure.source}).\n\n"
            text += f"![{figure.title}]({folder}/{figure.name}.png)\n\n"
            text += f"Missing: {'; '.join(figure.missing)}.\n\n" if figure.missing else ""
        else:
            others += f"- {figure.title} ({figure.source})\n"
    return text + (f"Not run, or only one curve of it:\n\n{others}" if others else "")


def compact(table: Table, above: Container[str] = ()) -> str:
    """A table for a page: ours with the paper's value in brackets, in bold where it is worse; then its notes.

    Notes that are ``above`` it are left out.
    """
    columns, rows = _merged(table) if table.paper else (table.columns, table.rows)
    text = markdown_rows(columns, rows) + "".join(f"\n{note}\n" for note in table.notes if note not in above)
    return text.replace("(*)", "(\\*)")


def _merged(table: Table) -> tuple[list[Column], list[list[Cell]]]:
    """Ours, the paper's and the difference in one column each."""
    columns: list[Column] = []
    rows: list[list[Cell]] = [[] for _ in table.rows]
    starts = [i for i, column in enumerate(table.columns) if not column.over or column.name == "ours"]
    for start, end in zip(starts, [*starts[1:], len(table.columns)], strict=True):
        column = table.columns[start]
        columns.append(Column(column.over or column.name, numeric=column.numeric))
        for merged, row in zip(rows, table.rows, strict=True):
            merged.append(_merge(row[start:end]))
    return columns, rows


def _merge(cells: Sequence[Cell]) -> Cell:
    ours, *others = cells
    shown = ours.text
    if others and others[0].text != MISSING:
        shown += f" ({others[0].text.replace('∞', 'never')})"
    return Cell(f"**{shown}**" if len(others) > 1 and others[1].tone == "worse" else shown)
