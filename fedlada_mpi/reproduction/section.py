"""The section of the report's page that compares our runs with the paper."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ..analysis import elements
from ..analysis.elements import Section
from ..analysis.tables import Table
from .figures import Figure

NOTES = (
    '<p class="note">Rounds: less is better. ∞: the paper says never; “> T”: not reached in our T rounds.</p>'
    '<p class="note">The paper does not state the clipping, the μ of FedProx and of SMU, the α of FedCM on CIFAR-100 '
    "and TinyImageNet, the normalisation, and the values of α in its figures: these are ours.</p>"
)


def sections(
    tables: Sequence[Table], figures: Sequence[Figure], formats: Sequence[str], interactive: bool
) -> list[Section]:
    """Tables and figures that there are runs for, and the names of the others; none where there are no runs of the
    paper's, as of digits or of a user's own data. ``formats`` are those of the figures' files."""
    ours = [table for table in tables if table.paper]
    with_runs = [table for table in ours if not table.empty]
    drawn = [figure for figure in figures if not figure.empty]
    if not with_runs and not drawn:
        return []
    missing = [f"{t.title} ({t.source})" for t in ours if t.empty]
    missing += [f"{f.title} ({f.source})" for f in figures if f.empty]
    parts = [
        NOTES,
        *map(elements.table, with_runs),
        *(_figure(figure, formats, interactive) for figure in drawn),
    ]
    if missing:
        names = "".join(f"<li>{html.escape(name)}</li>" for name in missing)
        summary = f"{len(missing)} of the paper's tables and figures have no runs yet"
        parts.append(f"<details><summary>{summary}</summary><ul>{names}</ul></details>")
    return [Section("paper", "Against the paper", "".join(parts))]


def _figure(figure: Figure, formats: Sequence[str], interactive: bool) -> str:
    parts = [
        f"<h3>{html.escape(figure.title)}</h3>",
        f'<p class="source">{html.escape(figure.source)}</p>{elements.files(formats, figure.name)}',
    ]
    if interactive:
        panels = (
            f'<div class="chart" data-panel="{figure.id}:{i}"></div>' for i, p in enumerate(figure.panels) if p.series
        )
        parts.append(f'<figure class="panels">{"".join(panels)}</figure>')
    else:
        parts.append(elements.picture(figure.name, figure.title))
    if figure.missing:
        parts.append(elements.note(f"Missing: {'; '.join(figure.missing)}."))
    return "".join(parts)
