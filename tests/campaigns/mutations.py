"""Small errors in the code, one at a time: do the tests notice an operator, a constant, a condition, a call?

    python -m tests.campaigns.mutations draw --seed 23 --each 10 --to errors.json     ten in each part of the package
    python -m tests.campaigns.mutations run errors.json --tests "-m 'not slow'"       which of them the tests find
    python -m tests.campaigns.mutations run errors.json --only 7 12 --jobs 8          two of them, eight at a time

Each error is tried in a copy of the repository of its own; with ``--ranks 2`` also by the tests on that many ranks.
Where ``--reached COVERAGE`` names a data file of ``pytest --cov --cov-context=test``, tests that reach the line come
first, and all others if these find nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FIRST = 150  # tests that reach a line, at most; all others come later
# Code for the GPU is left out: most of it does not run where the suite does.
PARTS = {
    "methods": ("fedlada_mpi/algorithms/*.py",),
    "engine": (
        "fedlada_mpi/rounds/*.py", "fedlada_mpi/rounds/*/*.py", "fedlada_mpi/models/*.py", "fedlada_mpi/session/*.py",
    ),
    "transport": ("fedlada_mpi/mpi/*.py",),
    "checkpoint": ("fedlada_mpi/rundir/*.py", "fedlada_mpi/support/disk.py", "fedlada_mpi/session/recovery/*.py"),
    "data": ("fedlada_mpi/data/*.py", "fedlada_mpi/data/sources/*.py", "data_prep/*.py"),
    "reports": ("fedlada_mpi/report.py", "fedlada_mpi/analysis/*.py", "fedlada_mpi/reproduction/*.py"),
}  # fmt: skip
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Pow: "*",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip
OTHER_CALLS = {
    "min": "max", "max": "min", "any": "all", "all": "any", "add_": "sub_", "sub_": "add_", "sum": "mean",
    "mean": "sum", "floor": "ceil", "ceil": "floor", "sorted": "list", "cumsum": "cumprod",
    "maximum": "minimum", "minimum": "maximum", "startswith": "endswith",
    "endswith": "startswith", "append": "remove", "zeros": "ones",
    "ones": "zeros", "zeros_like": "ones_like", "ones_like": "zeros_like",
}  # fmt: skip


class Error(NamedTuple):
    """``lines`` of a file, numbered from ``first``, become ``instead``."""

    part: str
    kind: str
    file: str
    first: int
    lines: list[str]
    instead: list[str]

    def __str__(self) -> str:
        changed = (pair for pair in zip(self.lines, self.instead, strict=False) if pair[0] != pair[1])
        was, now = next(changed, (self.lines[0], "".join(self.instead)))
        return f"{self.file}:{self.first} {self.kind}: {was.strip()}  ->  {now.strip()}"


def edits(tree: ast.Module, text: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Kind, what is replaced and by what, for everything in the file that could be wrong."""

    def source(node: ast.AST) -> str:
        return ast.get_source_segment(text, node) or ""

    annotations = {
        inner
        for node in ast.walk(tree)
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if note
        for inner in ast.walk(note)
    }
    in_strings = {inner for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in annotations or node in in_strings:
            continue
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                yield "operator", node, f"{source(left)} {COMPARISONS[type(op)]} {source(right)}"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                if not any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (left, right)):
                    yield "operator", node, f"{source(left)} {OPERATORS[type(op)]} {source(right)}"
            case ast.BoolOp(op=op, values=values):
                yield "operator", node, (" or " if isinstance(op, ast.And) else " and ").join(map(source, values))
            case ast.Constant(value=bool() as value):
                yield "constant", node, str(not value)
            case ast.Constant(value=int() | float() as value):
                yield "constant", node, str(value + 1)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield "condition", test, f"not ({source(test)})"
            case ast.Expr(value=ast.Call()):
                yield "call", node, "pass"
            case ast.Call(func=ast.Name(id=name)) if name in OTHER_CALLS:
                yield "call", node.func, OTHER_CALLS[name]
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in OTHER_CALLS:
                yield "call", node.func, f"{source(value)}.{OTHER_CALLS[name]}"


def candidates(part: str) -> list[Error]:
    found = []
    for path in sorted(path for pattern in PARTS[part] for path in ROOT.glob(pattern)):
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        for kind, node, instead in edits(ast.parse(text), text):
            first, last = node.lineno - 1, node.end_lineno
            block = lines[first:last]
            head = block[0].encode()[: node.col_offset].decode()
            tail = block[-1].encode()[node.end_col_offset :].decode()
            new = (head + instead + tail).splitlines(keepends=True)
            try:
                ast.parse("".join(lines[:first] + new + lines[last:]))
            except SyntaxError:
                continue
            found.append(Error(part, kind, str(path.relative_to(ROOT)), first + 1, block, new))
    return found


def draw(seed: int, each: int) -> list[Error]:
    """``each`` errors of every part, as even as can be over operators, constants, conditions and calls."""
    generator = random.Random(seed)
    found = []
    for part in PARTS:
        all_of_it = candidates(part)
        kinds = sorted({error.kind for error in all_of_it})
        for number in range(each):
            of_kind = [error for error in all_of_it if error.kind == kinds[number % len(kinds)] and error not in found]
            found.append(generator.choice(of_kind))
    return found


def reached_by(data: Path, error: Error) -> list[str]:
    """The tests in whose own process a line of the error was executed."""
    from coverage import CoverageData

    coverage = CoverageData(str(data))
    coverage.read()
    tests: set[str] = set()
    for file in coverage.measured_files():
        if file.endswith("/" + error.file):
            contexts = coverage.contexts_by_lineno(file)
            for line in range(error.first, error.first + len(error.lines)):
                tests |= {context.split("|")[0] for context in contexts.get(line, ()) if context}
    return sorted(tests)[:: len(tests) // FIRST + 1]


def not_tried(folder: str, names: list[str]) -> set[str]:
    """What users keep in their clone; packages have a folder data, too."""
    at_the_top = {"data", "runs", "site"} if Path(folder) == ROOT else set()
    return {name for name in names if name.startswith(".") or name == "__pycache__" or name in at_the_top}


def try_out(error: Error, words: list[str], first: list[str], ranks: int, limit: float) -> tuple[str, str]:
    """How the tests end with the error in place, and the test that failed."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=not_tried)
        path = copy / error.file
        lines = path.read_text().splitlines(keepends=True)
        places = [at for at in range(len(lines)) if lines[at : at + len(error.lines)] == error.lines]
        if not places:
            return "stale", "the code has changed since the draw"
        at = min(places, key=lambda at: abs(at + 1 - error.first))
        path.write_text("".join(lines[:at] + error.instead + lines[at + len(error.lines) :]))
        pytest = ["-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "--color=no", *words]
        commands = [[sys.executable, *pytest, *tests] for tests in ([first] if first else []) + [[]]]
        if ranks:
            commands.append(["mpirun", "-n", str(ranks), sys.executable, "-m", "mpi4py", *pytest])
        for command in commands:
            try:
                done = subprocess.run(
                    command, cwd=copy, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL
                )
            except subprocess.TimeoutExpired:
                return "found", f"not finished after {limit:.0f} s"
            failed = re.findall(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.M)
            if done.returncode not in (0, 4, 5):  # the last two: no such test any more, or none is selected
                return "found", failed[0] if failed else (done.stdout + done.stderr)[-300:].strip()
        return "survived", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--each", type=int, default=10)
    drawing.add_argument("--to", type=Path, required=True)
    running = commands.add_parser("run")
    running.add_argument("errors", type=Path)
    running.add_argument("--tests", default="", help="options for pytest, in one word")
    running.add_argument("--reached", type=Path, help="a data file of coverage, with a context for each test")
    running.add_argument("--only", type=int, nargs="*", help="numbers of errors, from 1 on")
    running.add_argument("--ranks", type=int, default=0)
    running.add_argument("--jobs", type=int, default=1)
    running.add_argument("--limit", type=float, default=1800, help="seconds for the tests of one error")
    chosen = parser.parse_args()
    if chosen.command == "draw":
        drawn = draw(chosen.seed, chosen.each)
        chosen.to.write_text(json.dumps([error._asdict() for error in drawn], indent=1) + "\n")
        print(*drawn, sep="\n")
        return

    errors = [Error(**fields) for fields in json.loads(chosen.errors.read_text())]
    words = shlex.split(chosen.tests)

    def one(number: int) -> str:
        error, start = errors[number - 1], time.monotonic()
        first = reached_by(chosen.reached, error) if chosen.reached else []
        outcome, words_of_it = try_out(error, words, first, chosen.ranks, chosen.limit)
        print(f"{number:3} {outcome:8} {time.monotonic() - start:5.0f} s  {error}\n      {words_of_it}", flush=True)
        return outcome

    with ThreadPoolExecutor(chosen.jobs) as pool:
        outcomes = list(pool.map(one, chosen.only or range(1, len(errors) + 1)))
    print(", ".join(f"{outcomes.count(each)} {each}" for each in sorted(set(outcomes))))


if __name__ == "__main__":
    main()
