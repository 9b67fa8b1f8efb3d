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

from ..rundir.columns import DIAGNOSED, PHASES
from ..support.version import __version__
from . import paper
from .figures import PHASE_COLOURS
from .groups import Group, Stat, by_problem, labels, slug, uneven
from .series import MARKERS, MEASURES, Look, finite_mean, looks, points, spent
from .tables import MISSING, Cell, Table, duration

WIDTH = 1.8  # of a line, in pixels
# Figures that no chart shows, by the start of their names.
WHOSE = {"clients_": "accuracies client by client", "silos_": "accuracy and loss silo by silo"}
POINTS = 12_000  # of all curves of one measure, so that the page stays small however many groups there are


def render(
    groups: Sequence[Group],
    tables: Sequence[Table],
    drawn: Sequence[str],
    where: str,
    problems: Sequence[str] = (),
    formats: Sequence[str] = ("png", "svg"),
) -> str:
    """The page; ``drawn`` are the names of the figures in the folder next to it, each in these formats, ``problems``
    what is left out."""
    library, files = plotly(), partial(_files, formats)
    sections = [
        ("paper", "Against the paper", _paper(groups, tables, bool(library), files)),
        ("curves", "Curves", _curves(groups, drawn, bool(library), files)),
        (
            "results",
            "Results",
            "".join(map(_table, _pick(tables, "overview", "differences_", "clients", "silos", "targets"))),
        ),
        ("diagnostics", "Diagnostics", _diagnostics(groups, tables, drawn, files)),
        ("time", "Time", _time(groups, tables, bool(library), drawn, files)),
        ("settings", "Settings and environment", "".join(map(_table, _pick(tables, "settings")))),
        ("runs", "Runs", _left_out(problems) + "".join(map(_table, _pick(tables, "runs")))),
    ]
    sections = [section for section in sections if section[2] or section[0] != "diagnostics"]
    if not any(not t.empty for t in tables if t.paper) and all(f.empty for f in paper.figures(groups)):
        # Nothing to compare with the paper (digits, own data): the runs' own results come first.
        sections = sections[1:] + sections[:1]
    template = Template(_text("page.html"))
    return template.substitute(
        title="Federated runs",
        lead=f"Read from {html.escape(where)} on {datetime.now():%d %B %Y, %H:%M}. "
        "Mean ± standard deviation over seeds; what has not been run is shown as –.",
        facts=_facts(groups),
        nav="".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections),
        body="".join(
            f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>{content}</section>'
            for name, title, content in sections
        ),
        footer=f"fedlada_mpi {__version__}. Every table is also in <code>tables/</code> as CSV, Markdown and LaTeX, "
        f"every figure in <code>figures/</code> as {', '.join(map(_format, formats))}.",
        css=_text("page.css"),
        js=_text("page.js"),
        plotly=library,
        data=_embedded(_data(groups)) if library else "{}",
    )


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


def _pick(tables: Sequence[Table], *starts: str) -> list[Table]:
    return [t for t in tables if not t.paper and t.id.startswith(starts)]


def _facts(groups: Sequence[Group]) -> str:
    runs = [run for one in groups for run in one.runs]
    finished = sum(run.complete for run in runs)
    counts = [(len(runs), "run"), (len(groups), "setting"), (len(by_problem(groups)), "task")]
    facts = [(f"{n:,}", name + "s" * (n != 1)) for n, name in [*counts, (sum(run.done for run in runs), "round")]]
    facts.insert(1, (f"{finished:,}", "finished"))
    seconds = sum(float(np.nansum(run.series["seconds_total"])) for run in runs)
    facts.append((duration(Stat((seconds,), 1)).text, "of training"))
    return "".join(f"<li><b>{value}</b><span>{name}</span></li>" for value, name in facts)


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def _cell(cell: Cell, tag: str, classes: str) -> str:
    sort = cell.value if cell.value is not None else cell.sort
    attributes = f' data-sort="{_number(sort)}"' if sort is not None else ""
    if cell.hint:
        attributes += f' title="{html.escape(cell.hint)}"'
    classes = " ".join(filter(None, [classes, cell.tone, "missing" if cell.text in (MISSING, paper.NOT_RUN) else ""]))
    scope = ' scope="row"' if tag == "th" else ""
    return f'<{tag}{scope} class="{classes}"{attributes}>{html.escape(cell.text)}</{tag}>'


def _number(value: float) -> str:
    return "Infinity" if value == math.inf else "-Infinity" if value == -math.inf else repr(float(value))


def _table(table: Table) -> str:
    columns = table.columns
    first = [bool(c.over) and (i == 0 or columns[i - 1].over != c.over) for i, c in enumerate(columns)]
    over = ""
    if any(c.over for c in columns):
        spans: list[list[Any]] = []
        for column in columns:
            if spans and column.over and spans[-1][0] == column.over:
                spans[-1][1] += 1
            else:
                spans.append([column.over, 1])
        cells = (f'<th colspan="{n}" scope="colgroup">{html.escape(t)}</th>' if t else "<td></td>" for t, n in spans)
        over = f'<tr class="over">{"".join(cells)}</tr>'
    heads = "".join(
        f'<th scope="col" class="{"" if c.numeric else "text"}{" first" if f else ""}">'
        f'<button type="button" data-column="{i}">{html.escape(c.name)}</button></th>'
        for i, (c, f) in enumerate(zip(columns, first, strict=True))
    )
    rows = "".join(
        "<tr>"
        + "".join(
            _cell(
                cell,
                "th" if i == 0 else "td",
                " ".join(
                    filter(
                        None, ["" if c.numeric else "text", "first" if f else "", c.name if c.name == "paper" else ""]
                    )
                ),
            )
            for i, (cell, c, f) in enumerate(zip(row, columns, first, strict=True))
        )
        + "</tr>"
        for row in table.rows
    )
    links = f'<a href="tables/{table.id}.csv">CSV</a>, <a href="tables/{table.id}.md">Markdown</a>, '
    links += f'<a href="tables/{table.id}.tex">LaTeX</a>'
    source = f"{html.escape(table.source)} · " if table.source else ""
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in table.notes)
    return (
        f'<h3 id="table-{table.id}">{html.escape(table.title)}</h3><p class="source">{source}{links}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="table-{table.id}">'
        f'<table class="sortable"><thead>{over}<tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{notes}'
    )


def _left_out(problems: Sequence[str]) -> str:
    lines = "".join(f"<li>{html.escape(problem)}</li>" for problem in problems)
    return f'<div class="note">Left out:<ul>{lines}</ul></div>' if problems else ""


def _picture(name: str, title: str) -> str:
    # On a phone it is wider than the screen, so that its text can be read: the arrow keys scroll it, too.
    image = f'<img src="figures/{name}.png" alt="{html.escape(title)}" loading="lazy">'
    return f'<figure class="picture" tabindex="0">{image}</figure>'


def _alt(problem: str, what: str, groups: Sequence[Group]) -> str:
    """What a picture shows, for those who do not see it; its numbers are in the tables."""
    names = labels(groups)
    return f"{problem}, {what}: {', '.join(names) if len(names) <= 10 else _count(len(names), 'setting')}"


Files = Callable[..., str]  # links to the files of these figures


def _files(formats: Sequence[str], *names: str) -> str:
    links = (f"{n}: " + ", ".join(f'<a href="figures/{n}.{f}">{_format(f)}</a>' for f in formats) for n in names)
    return f'<p class="source">{" · ".join(links)}</p>' if names else ""


def _format(suffix: str) -> str:
    return {"tex": "LaTeX"}.get(suffix, suffix.upper())


def _paper(groups: Sequence[Group], tables: Sequence[Table], library: bool, files: Files) -> str:
    ours = [t for t in tables if t.paper]
    parts = [
        '<p class="note">Rounds: less is better. ∞: the paper says never; “> T”: not reached in our T rounds.</p>',
        '<p class="note">The paper does not state the clipping, the μ of FedProx and of SMU, the α of FedCM on '
        "CIFAR-100 and TinyImageNet, the normalisation, and the values of α in its figures: these are ours.</p>",
    ]
    parts += [_table(t) for t in ours if not t.empty]
    without_runs = []
    for spec in paper.figures(groups):
        if spec.empty:
            without_runs.append(f"<li>{html.escape(spec.title)} ({html.escape(spec.source)})</li>")
            continue
        parts.append(f"<h3>{html.escape(spec.title)}</h3>")
        parts.append(f'<p class="source">{html.escape(spec.source)}</p>{files(f"paper_{spec.id}")}')
        if library:
            panels = (
                f'<div class="chart" data-panel="{spec.id}:{i}"></div>' for i, p in enumerate(spec.panels) if p.groups
            )
            parts.append(f'<figure class="panels">{"".join(panels)}</figure>')
        else:
            parts.append(_picture(f"paper_{spec.id}", spec.title))
        if spec.missing:
            parts.append(f'<p class="note">Missing: {html.escape("; ".join(spec.missing))}.</p>')
    empty = [t for t in ours if t.empty]
    if empty:
        inner = "".join(_table(t) for t in empty)
        parts.append(
            f"<details><summary>{_count(len(empty), 'table')} of the paper without runs yet</summary>{inner}</details>"
        )
    if without_runs:
        summary = f"{_count(len(without_runs), 'figure')} without runs yet"
        parts.append(f"<details><summary>{summary}</summary><ul>{''.join(without_runs)}</ul></details>")
    return "".join(parts)


def _curves(groups: Sequence[Group], drawn: Sequence[str], library: bool, files: Files) -> str:
    parts = []
    for index, (problem, members) in enumerate(by_problem([one for one in groups if one.done]).items()):
        names = [
            n
            for n in drawn
            if n.removesuffix(slug(problem))
            in ("curves_", *(f"{measure}_" for measure in MEASURES if measure not in DIAGNOSED), *WHOSE)
        ]
        parts.append(f"<h3>{html.escape(problem)}</h3>{files(*names)}")
        parts += [f'<p class="note">{html.escape(note)}</p>' for note in uneven(members)]
        apart = {name: what for start, what in WHOSE.items() for name in names if name.startswith(start)}
        if library:
            parts.append(_chart(index, problem, members))
        else:
            apart = {**{name: "curves over the rounds" for name in names if name not in apart}, **apart}
        parts += [_picture(name, _alt(problem, what, members)) for name, what in apart.items()]
    return "".join(parts) or '<p class="note">No rounds yet.</p>'


def _chart(index: int, problem: str, members: Sequence[Group]) -> str:
    """The place of a task's interactive curves, with what can be chosen."""
    known = [m for m in MEASURES if any(len(one.curve(m)[0]) for one in members)]
    measures = "".join(f'<option value="{m}">{html.escape(MEASURES[m])}</option>' for m in known)
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


def _diagnostics(groups: Sequence[Group], tables: Sequence[Table], drawn: Sequence[str], files: Files) -> str:
    parts = []
    for problem, members in by_problem(groups).items():
        starts = ("diagnostics_", *(f"{measure}_" for measure in DIAGNOSED))
        names = [n for n in drawn if n.removesuffix(slug(problem)) in starts]
        if names:
            parts.append(f"<h3>{html.escape(problem)}</h3>{files(*names)}")
            parts += [_picture(n, _alt(problem, "diagnostics over the rounds", members)) for n in names]
    parts += [_table(t) for t in _pick(tables, "diagnostics")]
    for table in _pick(tables, "speedup_"):
        parts += [_table(table), files(table.id), _picture(table.id, table.title)]
    return "".join(parts)


def _time(groups: Sequence[Group], tables: Sequence[Table], library: bool, drawn: Sequence[str], files: Files) -> str:
    parts = [_table(t) for t in _pick(tables, "cost", "phases")]
    for index, (problem, members) in enumerate(by_problem([one for one in groups if one.done]).items()):
        names = [n for n in drawn if n.removesuffix(slug(problem)) in ("phases_", "ranks_")]
        if names:
            parts.append(f"<h3>{html.escape(problem)}</h3>{files(*names)}")
            what = {"phases_": "seconds per round by phase", "ranks_": "seconds of training and waiting by rank"}
            if library:
                parts.append(f'<div class="chart" data-phases="{index}"></div>')
                del what["phases_"]
            shown = ((name, words) for start, words in what.items() for name in names if name.startswith(start))
            parts += [_picture(name, _alt(problem, words, members)) for name, words in shown]
    return "".join(parts)


def _data(groups: Sequence[Group]) -> dict[str, Any]:
    groups = [one for one in groups if one.done]
    position = {id(one): i for i, one in enumerate(groups)}
    most = max(40, min(300, POINTS // max(1, len(groups))))

    def series(members: Sequence[Group]) -> list[dict[str, Any]]:
        return [
            {"group": position[id(one)], "name": name, **_look(look)}
            for one, name, look in zip(members, labels(members), looks(members), strict=True)
        ]

    problems = by_problem(groups)
    return {
        "measures": MEASURES,
        "groups": [_curves_of(one, most) for one in groups],
        "charts": [{"series": series(members)} for members in problems.values()],
        "panels": {
            f.id: [_panel(f, p, series(p.groups)) for p in f.panels] for f in paper.figures(groups) if not f.empty
        },
        "phases": [_bars(members) for members in problems.values()],
    }


def _look(look: Look) -> dict[str, str]:
    """A look as Plotly takes it."""
    dash = ",".join(f"{WIDTH * length:g}px" for length in look.dash) or "solid"
    return {"colour": look.colour, "dark": look.dark, "dash": dash, "marker": MARKERS[look.marker]}


def _panel(spec: paper.Figure, panel: paper.Panel, series: list[dict[str, Any]]) -> dict[str, Any]:
    marks = []
    if panel.marked and panel.measure == "test_acc":
        printed = paper.marks(panel.dataset)
        for one, entry in zip(panel.groups, series, strict=True):
            if at := printed.get(one.method):
                x, y = zip(*at, strict=True)
                marks.append({"x": x, "y": y, **{n: entry[n] for n in ("name", "colour", "dark")}})
    done = max((one.done for one in panel.groups), default=0)
    return {
        "title": f"{panel.title}: {MEASURES[panel.measure]}",
        "measure": panel.measure,
        "series": series,
        "rounds": spec.rounds,
        "marks": marks,
        "shortest": min(done, spec.rounds),
    }


def _curves_of(one: Group, most: int) -> dict[str, Any]:
    """All curves of a group; those with points at the same rounds share the values of their horizontal axis."""
    along: dict[tuple[int, ...], int] = {}
    curves = {}
    for measure in MEASURES:
        rounds, mean, std, _ = points(one, measure, most)
        if len(rounds):
            at = along.setdefault(tuple(rounds.tolist()), len(along))
            curves[measure] = {"at": at, "mean": _short(mean), "std": None if np.isnan(std).all() else _short(std)}
    axes = [
        {
            "round": rounds,
            "units": _short(spent(one, "units", np.array(rounds))),
            "bytes": _short(spent(one, "bytes", np.array(rounds))),
            "seconds": _short(spent(one, "seconds", np.array(rounds))),
        }
        for rounds in along
    ]
    return {"axes": axes, "curves": curves}


def _short(values: np.ndarray) -> list[float | None]:
    """Four significant digits, None for what is not finite: enough for a screen, and half the size of the page."""
    return [_round(v) if math.isfinite(v) else None for v in values.tolist()]


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _bars(groups: Sequence[Group]) -> Mapping[str, Any]:
    means = [[finite_mean(one.curve(f"seconds_{phase}")[1]) for one in groups] for phase in PHASES]
    seconds = [[None if mean is None else _round(mean) for mean in row] for row in means]
    bars = zip(PHASES, seconds, PHASE_COLOURS, strict=True)
    return {
        "names": labels(groups),
        "phases": [{"name": phase, "seconds": row, "colour": colour} for phase, row, colour in bars],
    }
