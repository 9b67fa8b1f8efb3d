"""The commands on all pages: each option is one that its command has."""

from __future__ import annotations

import importlib
import re
from functools import cache

from command_reference import COMMANDS, parser_of
from repository import ROOT

from fedlada_mpi.algorithms import find, names
from fedlada_mpi.settings import flag, grouped

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*/*.md"))]
GENERATED = ROOT / "docs/reference.md"
INSTALLED = {name: module for module, name in COMMANDS.items() if name}
JOBS = {
    "prepare": "data_prep",
    "train": "fedlada_mpi.run",
    "report": "fedlada_mpi.report",
    "bench": "fedlada_mpi.bench",
}
COMMAND = re.compile(
    r"(?:python3? -m (?P<module>fedlada_mpi\.\w+|data_prep(?:\.\w+)?)"
    rf"|(?P<installed>{'|'.join(INSTALLED)})"
    rf"|jobs/submit\.sh (?P<job>{'|'.join(JOBS)})[^\n]*? --)(?=[\s`]|$)(?P<rest>[^`|;#\n]*)",
    re.MULTILINE,
)
OPTION = re.compile(r"(?<!\S)--?[A-Za-z][\w-]*")
QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")  # such as the launcher, with options of its own
HYPER = re.compile(r"^ +(\w+): \w+ = (?:fedlada_mpi\.)?hyper\(", re.MULTILINE)
SHOWN = 150  # commands on the pages, at least: fewer means that they are not found


@cache
def options(module: str) -> frozenset[str]:
    package = importlib.import_module(module)
    entry = importlib.import_module(f"{module}.__main__") if hasattr(package, "__path__") else package
    known = {name for action in parser_of(entry.main)._actions for name in action.option_strings}
    if module == "fedlada_mpi.run":
        settings = {name for group in grouped().values() for name in group}
        hypers = {name for method in names() for name in find(method).hypers}
        known |= {f"--{flag(name)}" for name in settings | hypers} | {"--help-all"}
    return frozenset(known)


def unknown(page: str) -> list[str]:
    """MODULE OPTION of each option that the command does not have; a page's own methods may have further ones."""
    own = {f"--{flag(name)}" for name in HYPER.findall(page)}
    found = []
    for command in commands(page):
        module = command["module"] or INSTALLED.get(command["installed"] or "") or JOBS[command["job"]]
        known = options(module) | (own if module == "fedlada_mpi.run" else set())
        found += [
            f"{module} {option}" for option in OPTION.findall(QUOTED.sub("", command["rest"])) if option not in known
        ]
    return found


def commands(page: str) -> list[re.Match[str]]:
    return [*COMMAND.finditer(page.replace("\\\n", " "))]


def test_the_options_of_all_pages_are_known():
    pages = {page: page.read_text() for page in PAGES if page != GENERATED}
    assert {page.name: unknown(text) for page, text in pages.items() if unknown(text)} == {}
    assert sum(len(commands(text)) for text in pages.values()) > SHOWN


def test_unknown_options_are_found():
    page = (
        "    pull: float = hyper(0.5, 'help')\n"
        "`python -m fedlada_mpi.run -n 4 --round 3 --pull 1`, not --this\n"
        "    mpirun --host a,b python -m data_prep \\\n        --row x --silos 2   # --comment\n"
        "fedlada-predict DIR --better\n"
        "jobs/submit.sh train --time=2 -- --lr 1 --rate 2\n"
    )
    assert unknown(page) == [
        *("fedlada_mpi.run --round", "data_prep --row", "fedlada_mpi.predict --better", "fedlada_mpi.run --rate"),
    ]
