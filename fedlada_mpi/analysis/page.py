"""One self-contained HTML page: sortable tables and interactive curves."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ..rundir.columns import CLASSIFICATION, DIAGNOSED, Columns
from ..support.version import __version__
from . import elements, latex, sweeps
from .elements import Section
from .groups import Group, Stat, by_problem, labels, problems, uneven
from .series import MARKERS, SPENT, Look, Panel, Series, phase_bars, points, quantities, series, spent
from .sweeps import COLOURS, HeatMap
from .tables import Table, duration

Files = Callable[..., str]  # links to the files of these figures
WIDTH = 1.8  # of a line, in pixels
# Figures that no chart shows, by the start of their names.
WHOSE = {"clients_": "client by client", "silos_": "silo by silo"}
POINTS = 12_000  # of all curves of one measure, so that the page stays small however many groups there are


def render(
    groups: Sequence[Group],
    tables: Sequence[Table],
    drawn: Sequence[str],
    where: str,
    problems: Sequence[str] = (),
    formats: Sequence[str] = ("png", "svg"),
    sections: Sequence[Section] = (),
    panels: Mapping[str, Sequence[Panel]] | None = None,
    title: str = "",
) -> str:
    """The page; ``drawn`` are the names of the figures in the folder next to it, each in these formats, ``problems``
    what is left out. ``sections`` are further ones, before the others, and ``panels`` the charts in them, by name."""
    library, files = plotly(), partial(elements.files, formats)

    maps = {one.name for one in sweeps.find(groups)}

    def figure_of(table: Table) -> str:
        if library and table.id in maps:
            return f'<div class="chart" data-map="{table.id}"></div>'
        return elements.picture(table.id, table.title)

    def tables_in(section: str) -> str:
        shown = [table for table in tables if table.section == section]
        return "".join(elements.table(t) + (files(t.id) + figure_of(t) if t.pictured else "") for t in shown)

    diagnostics = _diagnostics(groups, drawn, files) + tables_in("diagnostics")
    own = [
        Section("curves", "Curves", _curves(groups, drawn, bool(library), files)),
        Section("results", "Results", tables_in("results")),
        *([Section("diagnostics", "Diagnostics", diagnostics)] if diagnostics else []),
        Section("time", "Time", tables_in("time") + _time(groups, bool(library), drawn, files)),
        Section("settings", "Settings and environment", tables_in("settings")),
        Section("runs", "Runs", _left_out(problems) + tables_in("runs")),
    ]
    lead = f"Read from {where} on {datetime.now():%d %B %Y, %H:%M}. "
    lead += "Mean ± standard deviation over seeds; what has not been run is shown as –."
    data = _data(groups, panels or {}) if library else {}
    return assemble(title or "Federated runs", lead, _facts(groups), [*sections, *own], formats, library, data)


def assemble(
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    formats: Sequence[str],
    library: str = "",
    data: Mapping[str, Any] | None = None,
) -> str:
    """A page of these sections; ``facts`` are numbers with their names, ``data`` is what the charts show."""
    return Template(_text("page.html")).substitute(
        title=html.escape(title),
        lead=html.escape(lead),
        facts="".join(f"<li><b>{html.escape(value)}</b><span>{name}</span></li>" for value, name in facts),
        nav="".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections),
        body="".join(
            f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{content}</section>'
            for name, title, content in sections
        ),
        footer=f"fedlada_mpi {__version__}. Every table is also in <code>tables/</code> as CSV, Markdown and LaTeX, "
        f"every figure in <code>figures/</code> as {', '.join(map(elements.format_name, formats))}.",
        css=_text("page.css"),
        js=_text("page.js"),
        plotly=library,
        data=_embedded(data or {}),
    )


def write_tables(tables: Sequence[Table], folder: Path) -> None:
    """The files of the tables, to which the page links."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        (folder / f"{table.id}.csv").write_text(table.csv(), "utf-8")
        (folder / f"{table.id}.md").write_text(table.markdown(), "utf-8")
        (folder / f"{table.id}.tex").write_text(latex.table(table), "utf-8")


def plotly() -> str:
    """The source of the charting library; empty where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return get_plotlyjs().replace("</script", "<\\/script")


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _embedded(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _facts(groups: Sequence[Group]) -> list[tuple[str, str]]:
    runs = [run for one in groups for run in one.runs]
    finished = sum(run.complete for run in runs)
    counts = [(len(runs), "run"), (len(groups), "setting"), (len(by_problem(groups)), "task")]
    facts = [(f"{n:,}", name + "s" * (n != 1)) for n, name in [*counts, (sum(run.done for run in runs), "round")]]
    facts.insert(1, (f"{finished:,}", "finished"))
    seconds = sum(float(np.nansum(run.series["seconds_total"])) for run in runs)
    return [*facts, (duration(Stat((seconds,), 1)).text, "of training")]


def _left_out(problems: Sequence[str]) -> str:
    lines = "".join(f"<li>{html.escape(problem)}</li>" for problem in problems)
    return f'<div class="note">Left out:<ul>{lines}</ul></div>' if problems else ""


def _alt(problem: str, what: str, groups: Sequence[Group]) -> str:
    """What a picture shows, for those who do not see it; its numbers are in the tables."""
    names = labels(groups)
    return f"{problem}, {what}: {', '.join(names) if len(names) <= 10 else elements.count(len(names), 'setting')}"


def _curves(groups: Sequence[Group], drawn: Sequence[str], library: bool, files: Files) -> str:
    parts = []
    for index, (problem, slug, members) in enumerate(problems([one for one in groups if one.done])):
        names = [
            n
            for n in drawn
            if n.removesuffix(slug)
            in ("curves_", *(f"{m}_" for m in quantities(members[0].columns) if m not in DIAGNOSED), *WHOSE)
        ]
        parts.append(f"<h3>{html.escape(problem)}</h3>{files(*names)}")
        parts += map(elements.note, uneven(members))
        title = members[0].columns.objective.title
        apart = {name: f"{title} {what}" for start, what in WHOSE.items() for name in names if name.startswith(start)}
        if library:
            parts.append(_chart(index, problem, members))
        else:
            apart = {**{name: "curves over the rounds" for name in names if name not in apart}, **apart}
        parts += [elements.picture(name, _alt(problem, what, members)) for name, what in apart.items()]
    return "".join(parts) or elements.note("No rounds yet.")


def _chart(index: int, problem: str, members: Sequence[Group]) -> str:
    """The place of a task's interactive curves, with what can be chosen."""
    offered = quantities(members[0].columns)
    known = {m: title for m, (title, _) in offered.items() if any(one.has(m) for one in members)}
    measures = "".join(f'<option value="{m}">{html.escape(title)}</option>' for m, title in known.items())
    axes = "".join(
        f'<option value="{value}">{text}</option>'
        for value, text in (("round", "rounds"), ("units", "Nd"), ("bytes", "bytes"), ("seconds", "time"))
    )
    return (
        f'<figure data-curves="{index}" aria-label="Curves: {html.escape(problem)}"><div class="tools">'
        f"<label>Show <select>{measures}</select></label>"
        f"<label>against <select>{axes}</select></label>"
        '<label><input type="checkbox"> logarithmic</label></div><div class="chart"></div></figure>'
    )


def _diagnostics(groups: Sequence[Group], drawn: Sequence[str], files: Files) -> str:
    parts = []
    for problem, slug, members in problems([one for one in groups if one.done]):
        starts = ("diagnostics_", *(f"{measure}_" for measure in DIAGNOSED))
        names = [n for n in drawn if n.removesuffix(slug) in starts]
        if names:
            parts.append(f"<h3>{html.escape(problem)}</h3>{files(*names)}")
            parts += [elements.picture(n, _alt(problem, "diagnostics over the rounds", members)) for n in names]
    return "".join(parts)


def _time(groups: Sequence[Group], library: bool, drawn: Sequence[str], files: Files) -> str:
    parts = []
    for index, (problem, slug, members) in enumerate(problems([one for one in groups if one.done])):
        names = [n for n in drawn if n.removesuffix(slug) in ("phases_", "ranks_")]
        if names:
            parts.append(f"<h3>{html.escape(problem)}</h3>{files(*names)}")
            what = {"phases_": "seconds per round by phase", "ranks_": "seconds of training and waiting by rank"}
            if library:
                parts.append(f'<div class="chart" data-phases="{index}"></div>')
                del what["phases_"]
            shown = ((name, words) for start, words in what.items() for name in names if name.startswith(start))
            parts += [elements.picture(name, _alt(problem, words, members)) for name, words in shown]
    return "".join(parts)


def _data(groups: Sequence[Group], panels: Mapping[str, Sequence[Panel]]) -> dict[str, Any]:
    groups = [one for one in groups if one.done]
    position = {id(one): i for i, one in enumerate(groups)}
    most = max(40, min(300, POINTS // max(1, len(groups))))

    def entries(members: Sequence[Series]) -> list[dict[str, Any]]:
        return [{"group": position[id(one)], "name": label, **_look(look)} for one, label, look in members]

    problems = by_problem(groups)
    return {
        "measures": _titles(CLASSIFICATION),
        "groups": [_curves_of(one, most) for one in groups],
        "charts": [{"series": entries(series(m)), **_own_measures(m[0].columns)} for m in problems.values()],
        "panels": {name: [_panel(panel, entries(panel.series)) for panel in each] for name, each in panels.items()},
        "phases": [_bars(members) for members in problems.values()],
        "maps": {one.name: _map(one) for one in sweeps.find(groups)},
        "percent": _percent(CLASSIFICATION),
    }


def _titles(columns: Columns) -> dict[str, str]:
    return {measure: quantity.title for measure, quantity in quantities(columns).items()}


def _percent(columns: Columns) -> list[str]:
    return [measure for measure, quantity in quantities(columns).items() if quantity.percent]


def _own_measures(columns: Columns) -> dict[str, Any]:
    """What a chart shows otherwise than those of classification."""
    return {} if columns == CLASSIFICATION else {"measures": _titles(columns), "percent": _percent(columns)}


def _map(one: HeatMap) -> dict[str, Any]:
    across, down = one.ticks
    return {
        "title": one.title,
        "value": one.value_name,
        "x": {"title": one.x_name, "ticks": across},
        "y": {"title": one.y_name, "ticks": down},
        "means": [[None if mean is None else _round(mean) for mean in row] for row in one.means],
        "shown": [[one.cell(each).text for each in row] for row in one.stats],
        "range": one.extent,
        "colours": COLOURS,
        # On black the scale is turned round, so that high values stand out there, too.
        "ink": {
            mode: [["" if mean is None else one.ink(mean, mode == "dark") for mean in row] for row in one.means]
            for mode in ("light", "dark")
        },
        **({} if one.objective.percent else {"short": _written(one), "unit": ""}),
        **({} if one.objective.larger_is_better else {"smaller": True}),
    }


def _written(one: HeatMap) -> list[list[str]]:
    return [["–" if mean is None else one.short(mean) for mean in row] for row in one.means]


def _look(look: Look) -> dict[str, str]:
    """A look as Plotly takes it."""
    dash = ",".join(f"{WIDTH * length:g}px" for length in look.dash) or "solid"
    return {"colour": look.colour, "dark": look.dark, "dash": dash, "marker": MARKERS[look.marker]}


def _panel(panel: Panel, entries: list[dict[str, Any]]) -> dict[str, Any]:
    marks = []
    for each, entry in zip(panel.series, entries, strict=True):
        if at := panel.published.get(each.group.method):
            x, y = zip(*at, strict=True)
            marks.append({"x": x, "y": y, **{n: entry[n] for n in ("name", "colour", "dark")}})
    return {
        "title": f"{panel.title}: {quantities()[panel.measure].title}",
        "measure": panel.measure,
        "series": entries,
        "rounds": panel.rounds,
        "marks": marks,
        "shortest": min(panel.done, panel.rounds),
    }


def _curves_of(one: Group, most: int) -> dict[str, Any]:
    """All curves of a group; those with points at the same rounds share the values of their horizontal axis."""
    along: dict[tuple[int, ...], int] = {}
    curves = {}
    for measure in quantities(one.columns):
        rounds, mean, std = points(one, measure, most)
        if len(rounds):
            at = along.setdefault(tuple(rounds.tolist()), len(along))
            curves[measure] = {"at": at, "mean": _short(mean), "std": None if std is None else _short(std)}
    axes = [
        {"round": rounds, **{what: _short(spent(one, what, np.array(rounds))) for what in SPENT}} for rounds in along
    ]
    return {"axes": axes, "curves": curves}


def _short(values: np.ndarray) -> list[float | None]:
    """Four significant digits, None for what is not finite: enough for a screen, and half the size of the page."""
    return [_round(v) if math.isfinite(v) else None for v in values.tolist()]


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _bars(groups: Sequence[Group]) -> dict[str, Any]:
    phases = [
        {"name": phase, "seconds": [None if mean is None else _round(mean) for mean in seconds], "colour": colour}
        for phase, colour, seconds in phase_bars(groups)
    ]
    return {"names": labels(groups), "phases": phases}
