"""The settings and the environment of the groups: what all have in common, once, and what differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import settings
from .groups import SYMBOLS, Group, show
from .tables import HEAD, MISSING, Cell, Column, Table, named

ENVIRONMENT = {
    "device": "device",
    "ranks": "ranks",
    "transport": "transport",
    "fedlada_mpi": "fedlada_mpi",
    "torch": "torch",
    "python": "Python",
    "mpi": "MPI",
    "commit": "commit",
}
NAMES = {
    "lr": "learning rate η_l",
    "server_lr": "server rate η_g",
    "batch_size": "batch",
    "weight_decay": "weight decay λ",
}
MAIN = ("model", "batch_size", "lr", "server_lr", "weight_decay")
RUNTIME = ("rounds", "eval_every", "eval_train_every")  # that results depend on
UNKNOWN = "not recorded"
RARE = "unlike the others"


def tables(groups: Sequence[Group]) -> list[Table]:
    """What differs between the groups, one row each; then what all of them share."""
    rows = [_values(one) for one in groups]
    names = list(rows[0]) if rows else []
    common = [name for name in names if len({row[name] for row in rows}) == 1]
    differing = [name for name in names if name not in common]
    usual = {name: Counter(row[name] for row in rows).most_common(1)[0] for name in differing}
    columns = [*HEAD, *(Column(name, numeric=False) for name in (*differing, "of the method"))]
    body = []
    at = {id(one): row for one, row in zip(groups, rows, strict=True)}
    for one, head in named(groups):
        cells = [_cell(at[id(one)][each], *usual[each], len(groups)) for each in differing]
        body.append([*head, *cells, Cell(_own(one) or MISSING)])
    notes = [f"What differs between the groups; bold: {RARE}. Several values: seeds differ in it."]
    differ = Table("settings", "What differs", columns, body, notes=notes, section="settings")
    shared = [[Cell(name), Cell(rows[0][name])] for name in common]
    heads = [Column("Setting", numeric=False), Column("Value", numeric=False)]
    return [differ, Table("settings_shared", "Shared by all groups", heads, shared, section="settings")]


def _cell(value: str, usual: str, count: int, of: int) -> Cell:
    """A value, in bold where most of the groups have another one."""
    rare = value != usual and 2 * count > of
    return Cell(value, hint=RARE if rare else "", tone="rare" if rare else "")


def _values(one: Group) -> dict[str, str]:
    """The settings that all methods have, and the environment, the main ones first; of several seeds, every value."""
    shown = [
        n for n, each in settings.SETTINGS.items() if not each.runtime and n not in ("algorithm", "dataset", "seed")
    ]
    values = {}
    for name in (*MAIN, *ENVIRONMENT, *RUNTIME, *shown):
        if name in ENVIRONMENT:
            values[ENVIRONMENT[name]] = _several(str(run.environment.get(name) or UNKNOWN) for run in one.runs)
        else:
            values[setting_name(name)] = _several(in_words(name, _value(run.settings, name)) for run in one.runs)
    return values


def _value(of: Mapping[str, Any], name: str) -> Any:
    """A setting's value; of a loss that was not given, the default of the task."""
    default = settings.TASKS.get(of["task"], ("",))[0] if name == "loss" else ""
    return default if of[name] == "" else of[name]


def setting_name(name: str) -> str:
    """A setting's name as a heading."""
    return NAMES.get(name, SYMBOLS.get(name, name.replace("_", " ")))


def in_words(name: str, value: Any) -> str:
    """A setting's value as text, also where it is a number that stands for something else. The setting's help says
    what for: "-1 = as eval_every"."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    known = re.findall(r"[;,] (-?\d+) = ([^;,(]+)", settings.SETTINGS[name].help if name in settings.SETTINGS else "")
    meaning = dict(known).get(text, "").removeprefix("--").replace("_", " ").strip()
    return meaning or text or MISSING


def _several(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _own(one: Group) -> str:
    """The settings that only this method has."""
    own = {name: value for name, value in one.settings.items() if name not in settings.SETTINGS}
    return ", ".join(show(name, value) if name in SYMBOLS else f"{name}={value}" for name, value in own.items())
