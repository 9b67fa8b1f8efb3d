"""Parts of the HTML page: tables, pictures, links to files, and the sections that they are in."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from .tables import HEAD, MISSING, NOT_RUN, Cell, Table


class Section(NamedTuple):
    """A section of the page."""

    name: str
    title: str
    content: str


def count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def _cell(cell: Cell, leading: bool, classes: str) -> str:
    """A cell; a ``leading`` one names its row."""
    sort = cell.value if cell.value is not None else cell.sort
    attributes = f' data-sort="{_number(sort)}"' if sort is not None else ""
    if cell.hint:
        attributes += f' title="{html.escape(cell.hint)}"'
    classes = " ".join(filter(None, [classes, cell.tone, "missing" if cell.text in (MISSING, NOT_RUN) else ""]))
    text = html.escape(cell.text)
    if leading:
        return f'<th scope="row" class="{classes}"{attributes}><span>{text}</span></th>'
    return f'<td class="{classes}"{attributes}>{text}</td>'


def _number(value: float) -> str:
    return "Infinity" if value == math.inf else "-Infinity" if value == -math.inf else repr(float(value))


def table(one: Table) -> str:
    """The first columns name a row, and stay in sight where the others are scrolled."""
    columns = one.columns
    leading = len(HEAD) if columns[: len(HEAD)] == HEAD else 1
    starts = [bool(c.over) and (i == 0 or columns[i - 1].over != c.over) for i, c in enumerate(columns)]

    def classes(i: int, *more: str) -> str:
        known = {"text": not columns[i].numeric, "first": starts[i], "name": i < leading, "last": i == leading - 1}
        return " ".join([*(name for name, holds in known.items() if holds), *filter(None, more)])

    over = ""
    if one.headings:
        cells = (
            f'<th colspan="{last - first + 1}" scope="colgroup">{html.escape(text)}</th>'
            if text
            else f'<td class="{classes(first - 1)}"></td>'
            for text, first, last in one.headings
        )
        over = f'<tr class="over">{"".join(cells)}</tr>'
    heads = "".join(
        f'<th scope="col" class="{classes(i)}">'
        f'<button type="button" data-column="{i}">{html.escape(c.name)}</button></th>'
        for i, c in enumerate(columns)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            _cell(cell, i < leading, classes(i, c.name if c.name == "paper" else ""))
            for i, (cell, c) in enumerate(zip(row, columns, strict=True))
        )
        + "</tr>"
        for row in one.rows
    )
    links = f'<a href="tables/{one.id}.csv">CSV</a>, <a href="tables/{one.id}.md">Markdown</a>, '
    links += f'<a href="tables/{one.id}.tex">LaTeX</a>'
    source = f"{html.escape(one.source)} · " if one.source else ""
    notes = "".join(map(note, one.notes))
    return (
        f'<h3 id="table-{one.id}">{html.escape(one.title)}</h3><p class="source">{source}{links}</p>'
        f'<div class="wide"><div class="scroll" tabindex="0" role="region" aria-labelledby="table-{one.id}">'
        f'<table class="sortable"><thead>{over}<tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></div>{notes}'
    )


def picture(name: str, title: str) -> str:
    # On a phone it is wider than the screen, so that its text can be read: the arrow keys scroll it, too.
    image = f'<img src="figures/{name}.png" alt="{html.escape(title)}" loading="lazy">'
    return f'<div class="wide"><figure class="picture" tabindex="0">{image}</figure></div>'


def files(formats: Sequence[str], *names: str) -> str:
    """Links to the files of these figures."""
    links = (f"{n}: " + ", ".join(f'<a href="figures/{n}.{f}">{format_name(f)}</a>' for f in formats) for n in names)
    return f'<p class="source">{" · ".join(links)}</p>' if names else ""


def format_name(suffix: str) -> str:
    return {"tex": "LaTeX"}.get(suffix, suffix.upper())
