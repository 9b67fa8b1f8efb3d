"""The tables of the methods in docs/methods.md, made from their classes and from a record of runs.

python tests/helpers/methods_table.py
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from repository import ROOT

from fedlada_mpi.algorithms import Algorithm, create, find, names, resolve
from fedlada_mpi.settings import flag

HEAD = (
    "`--algorithm`",
    "method",
    "down",
    "up",
    "server keeps",
    "clients keep",
    "a step",
    "a round",
    "own settings",
    "lines",
)


RATES = ROOT / "docs" / "bench" / "h200-methods-rates.json"
RATES_HEAD = ("method", "preset rate", "× 0.1", "× 0.3", "× 1", "× 3", "MB per participant", "GPU memory")


def table() -> str:
    rows = [_row(create(resolve({"algorithm": name}).config)) for name in names()]
    return _markdown(HEAD, ("---",) * 9 + ("---:",), rows)


def rates_table() -> str:
    """The best first."""
    methods = json.loads(RATES.read_text())["methods"]
    best_first = sorted(methods, key=lambda name: -max(methods[name]["validation_accuracy"]))
    rows = [_rates_row(name, methods[name]) for name in best_first]
    return _markdown(RATES_HEAD, ("---",) + ("---:",) * (len(RATES_HEAD) - 1), rows)


def _rates_row(name: str, tried: dict[str, Any]) -> tuple[str, ...]:
    scores = tried["validation_accuracy"]
    shown = [f"**{100 * score:.1f}**" if score == max(scores) > 0.1 else f"{100 * score:.1f}" for score in scores]
    return (
        find(name).title().replace("*", "\\*"),
        f"{10 * tried['lr'][0]:g}",
        *shown,
        f"{tried['bytes_per_participant'] / 1e6:.0f}",
        f"{tried['memory_bytes'] / 1e9:.1f} GB",
    )


def _markdown(head: tuple[str, ...], align: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, align, *rows))


def _row(a: Algorithm) -> tuple[str, ...]:
    cls = type(a)
    path = Path(inspect.getfile(cls))
    vectors = len(a.slots) + len(a.client_state)
    step = ["2 gradients" if a.gradients == 2 else "1 gradient", *([_vectors(vectors)] if vectors else [])]
    settings = ", ".join(f"`{flag(name)}` {_shown(setting.default)}" for name, setting in cls.hypers.items())
    return (
        f"`{cls.name}`",
        f"{cls.title().replace('*', chr(92) + '*')}, {_source(cls)}",
        _named([*a.down, *(f"({name})" for name in a.derived)]),
        _named([*a.up, *(f"{name} [number]" for name in a.scalars)]),
        _named(a.private),
        _named(a.client_state),
        ", ".join(step),
        f"{len(a.down)} + {len(a.up)}" + (", 1 pass" if a.full_gradient else ""),
        settings or "–",
        f"[{code_lines(path.read_text())}](../fedlada_mpi/algorithms/{path.name})",
    )


def _vectors(count: int) -> str:
    return f"{count} vector{'s' * (count > 1)}"


def _named(vectors: list[str] | tuple[str, ...]) -> str:
    return ", ".join(re.sub(r"\w+", r"`\g<0>`", name, count=1) for name in vectors) or "–"


def _shown(value: object) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else ("on" if value else "off")
        if isinstance(value, bool)
        else str(value)
    )


def _source(cls: type[Algorithm]) -> str:
    """The authors as the file's first line has them, where it is about this class, and the year."""
    first = (inspect.getmodule(cls).__doc__ or "").partition("\n")[0]
    found = re.match(r"[^(]*\(([A-Z][^(),]*)(, \d{4})?\)", first)
    about = found and (found[2] == f", {cls.year}" or first.startswith(cls.title()))
    return f"{found[1]} {cls.year}" if found and about else str(cls.year)


def code_lines(text: str) -> int:
    """Lines that are neither blank, nor comment, nor docstring."""
    tree = ast.parse(text)
    documented = (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
    strings = [n.body[0] for n in documented if ast.get_docstring(n) is not None]
    prose = {line for n in strings for line in range(n.lineno, n.end_lineno + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in prose for i, line in lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n\n{rates_table()}\n")
