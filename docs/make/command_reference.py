"""docs/reference.md, made from the code: python docs/make/command_reference.py > docs/reference.md"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from unittest import mock

from fedlada_mpi.algorithms import find, names
from fedlada_mpi.run import OPTIONS
from fedlada_mpi.settings import MOST, PRESETS, Setting, flag, grouped, not_in_paper

# The modules of the commands, and what the installed ones are called.
COMMANDS = {
    "fedlada_mpi.run": "fedlada-run",
    "fedlada_mpi.grid": "fedlada-grid",
    "fedlada_mpi.tune": "fedlada-tune",
    "fedlada_mpi.report": "fedlada-report",
    "fedlada_mpi.bench": "fedlada-bench",
    "fedlada_mpi.scaling": "",
    "fedlada_mpi.doctor": "fedlada-doctor",
    "fedlada_mpi.predict": "fedlada-predict",
    "fedlada_mpi.keys": "",
    "data_prep": "fedlada-prep",
    "data_prep.inspect": "",
    "data_prep.bench": "",
}
INTRODUCTION = """# Command reference

All commands with all their options and settings, and those of every method, as the code has them.
`python docs/make/command_reference.py > docs/reference.md` makes this page; the test suite compares it with the code.
`--help` of a command (`--help-all` of a run) lists the same, with the values that it will use."""
VARIABLES = """## Variables of the environment

Those of the scripts in `jobs/` are in [install](install.md#one-command) and [SLURM](slurm.md#settings).

| variable | |
| --- | --- |
| `FEDLADA_DATA` | the folder of all data sets' shards [`data`] |
| `FEDLADA_LAUNCHER` | what `grid` and `tune` start ranks with, as `--launcher` |
| `FEDLADA_SILO` | of a rank: the name of its silo |
| `FEDLADA_START_LIMIT` | seconds to wait until all ranks have started [300] |
| `OMP_NUM_THREADS` | threads of a rank on a CPU [by the work of a step] |"""


class _Captured(Exception):
    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def parser_of(main: Callable[[Sequence[str]], int]) -> argparse.ArgumentParser:
    """What a command parses its arguments with, taken where it begins to."""
    parse = argparse.ArgumentParser.parse_known_args

    def capture(self: argparse.ArgumentParser, *arguments, **options):
        if self.add_help:  # the others look for one option in advance
            raise _Captured(self)
        return parse(self, *arguments, **options)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", capture):
        try:
            main([])
        except _Captured as captured:
            return captured.parser
    raise AssertionError(f"{main} parses no arguments")


def page() -> str:
    rows, parts = [], []
    for module, installed in COMMANDS.items():
        package = importlib.import_module(module)
        entry = importlib.import_module(f"{module}.__main__") if hasattr(package, "__path__") else package
        documentation = _documentation(entry)
        title = f"python -m {module}"
        anchor = title.replace(" ", "-").replace(".", "")
        rows.append(
            (f"[`{title}`](#{anchor})", f"`{installed}`" if installed else "", documentation.partition("\n")[0])
        )
        parts.append(f"## {title}\n\n{documentation}\n\n{_options(parser_of(entry.main), module)}")
    return "\n\n".join([INTRODUCTION, _table(("command", "the same as", ""), rows), *parts, VARIABLES]) + "\n"


def _documentation(module: ModuleType) -> str:
    """A module's docstring as Markdown, its commands indented."""
    text = inspect.cleandoc(module.__doc__ or "")
    return re.sub(r"^(?=python -m |mpirun |srun )", "    ", text.replace("``", "`"), flags=re.MULTILINE)


def _options(parser: argparse.ArgumentParser, module: str) -> str:
    actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
    if module != "fedlada_mpi.run":
        return _table(("option", "value", "meaning"), map(_action, actions))
    own = _table(("option", "value", "meaning"), (_action(a) for a in actions if a.dest in OPTIONS))
    parts = [own, "### Settings", SETTINGS_TEXT]
    for title, settings in grouped().items():
        parts += [f"#### {title.capitalize()}", _settings(settings.values())]
    return "\n\n".join([*parts, "### Presets of the data sets", PRESETS_TEXT, _presets(), *_methods()])


SETTINGS_TEXT = """A setting is taken from the command line, `--config FILE.toml` (there with `_` for `-`), the preset
of the method, the preset of the data set or the default, in that order; `--print-config` shows which. Those with ↻ may
be changed when a run is resumed."""
PRESETS_TEXT = (
    "Values of what is not given. Those of `cifar10`, `cifar100` and `tinyimagenet` are the paper's, all others ours."
)


def _action(action: argparse.Action) -> tuple[str, ...]:
    spelled = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    help_ = (action.help or "").replace("%%", "%")
    default = action.default
    if default not in (None, argparse.SUPPRESS, False, "", (), []) and "[" not in help_ and not _is_flag(action):
        values = default if isinstance(default, (list, tuple)) else [default]
        help_ += f" [{' '.join(map(str, values))}]"
    return spelled, _value(action), _cell(help_)


def _is_flag(action: argparse.Action) -> bool:
    return action.nargs == 0


def _value(action: argparse.Action) -> str:
    if _is_flag(action):
        return ""
    if action.choices:
        text = " ".join(f"`{choice}`" for choice in action.choices)
    else:
        text = {int: "integer", float: "number"}.get(action.type, "") or f"`{action.metavar or action.dest.upper()}`"
    return f"{text}{'; several' * (action.nargs in ('*', '+'))}{'; optional' * (action.nargs == '?')}"


def _settings(settings: Iterable[Setting], method: str = "") -> str:
    rows = []
    for s in settings:
        names_ = f"`--{flag(s.name)}`" + (f", `--no-{flag(s.name)}`" if s.kind == "bool" else "")
        note = " (ours: the paper states none)" if "" in not_in_paper(s.name, method) else ""
        rows.append((names_ + " ↻" * s.runtime, _kind(s), _default(s.default), _cell(s.help + note)))
    return _table(("setting", "value", "default", "meaning"), rows)


def _kind(s: Setting) -> str:
    if s.choices:
        return " ".join(f"`{choice}`" for choice in s.choices)
    kind = {"bool": "", "int": "integer", "float": "number", "str": "text", "list[float]": "numbers"}[s.kind]
    most = None if s.most == MOST.get(type(s.default)) else s.most
    bounds = (("≥", s.least), (">", s.above), ("≤", most), ("<", s.below))
    return ", ".join(
        [*filter(None, [kind]), *(f"{sign} {_number(bound)}" for sign, bound in bounds if bound is not None)]
    )


def _number(bound: float) -> str:
    """Bounds of 32 and 64 bits as such."""
    power = next((n for n in (19, 32, 63) if bound == 2**n - 1), None)
    return f"{bound:g}" if power is None else f"2^{power} - 1"


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in ("", []) else f"`{value}`" if isinstance(value, str) else str(value)


def _presets() -> str:
    known = [name for settings in grouped().values() for name in settings if any(name in p for p in PRESETS.values())]
    rows = [
        (f"`--{flag(name)}`", *(_default(p[name]) if name in p else "" for p in PRESETS.values())) for name in known
    ]
    return _table(("setting", *(f"`{name}`" for name in PRESETS)), rows)


def _methods() -> list[str]:
    """The settings and presets of every method, in the order of publication."""
    parts = ["### Settings of the methods", "By the name that `--algorithm` takes; [what each does](methods.md)."]
    for name in names():
        cls = find(name)
        parts += [f"#### {name}", f"{_cell(cls.title())}, {cls.year}."]
        parts += [_settings(cls.hypers.values(), name)] if cls.hypers else ["It has no settings of its own."]
        for words, presets in (("Preset", cls.presets), ("With `--preset tuned`", cls.tuned)):
            parts += [f"{words}{_where(d)}: {_assigned(values)}." for d, values in presets.items() if values]
        if cls.requires:
            parts.append(f"Always: {_assigned(cls.requires)}.")
    return parts


def _where(dataset: str) -> str:
    return f" on `{dataset}`" if dataset else ""


def _assigned(values: dict[str, object]) -> str:
    return ", ".join(
        f"`--{flag(name)} {value if isinstance(value, str) else json.dumps(value)}`" for name, value in values.items()
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


if __name__ == "__main__":
    sys.stdout.write(page())
