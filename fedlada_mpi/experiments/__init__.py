"""The paper's experiments as data, one TOML file each, and their expansion into runs.

    title = "..."                    # shown in lists and by the report
    paper = "..."                    # the paper's tables and figures that it reproduces
    [base]                           # settings of every run; a list is an axis, and axes are crossed
    [[runs]]                         # optional, any number: settings added to the base for some of the runs

Settings are those of ``python -m fedlada_mpi.run``, checked when the file is read. What is not given comes from the
presets of the data set and the method.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from .. import settings
from ..algorithms import resolve, settings_of
from ..data.datasets import NoShardsError, resolve_dataset, resolve_with_data
from ..rundir import metrics
from ..rundir.results import finished_rounds
from ..settings.fields import shown
from ..support import code_digest
from ..support.code_digest import Code, Files
from ..support.errors import UserError, shortened
from ..support.inputs import check_path, read_json, require_regular
from ..support.suggestions import did_you_mean
from .names import RunName, entries

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid: the settings written in its file, and the directory that follows from them."""

    given: dict[str, Any]
    rounds: int
    directory: Path
    name: RunName
    runtime: dict[str, Any] = field(default_factory=dict)  # all settings that are not part of its name
    axes: frozenset[str] = frozenset()  # of its plan
    code: Code = field(default_factory=dict)  # digests of a user's own method and model
    ranks: int | None = None  # that the run starts on this machine by itself, without a launcher
    overwrite: bool = False  # where it was made by other code
    accept_changed_code: bool = False
    keep_checkpoints: bool = True  # once it has finished; without them it cannot get more rounds

    def command(self, launcher: Sequence[str] = ()) -> list[str]:
        """The command that starts or resumes this run."""
        arguments: list[str] = []
        known = settings_of(self.given.get("algorithm", settings.SETTINGS["algorithm"].default))
        for name in [name for name in known if name in self.given]:
            value = self.given[name]
            option = f"--{settings.flag(name)}"
            if isinstance(value, bool):
                arguments.append(option if value else f"--no-{settings.flag(name)}")
            elif isinstance(value, list):
                # argparse takes -1e-05 for an option, and -0.00001 for a number.
                arguments += [option, *(f"{Decimal(str(v)):f}" if v < 0 else str(v) for v in value)]
            elif str(value).startswith("-"):
                arguments.append(f"{option}={value}")
            else:
                arguments += [option, str(value)]
        arguments += ["-n", str(self.ranks)] if self.ranks else []
        arguments += ["--accept-changed-code"] if self.accept_changed_code else []
        how = "--overwrite" if self.overwrite and self.changed() else "--resume"
        return [*launcher, sys.executable, "-m", "fedlada_mpi.run", *arguments, "--out", str(self.directory), how]

    def located(self) -> PlannedRun:
        """With the directory that has this run now: another plan may have begun it meanwhile, under another name."""
        root = self.directory.parent
        return replace(self, directory=root / self.name.choose(self.axes, entries(root)))

    def rounds_done(self) -> int:
        """The last round in metrics.jsonl, read from its end."""
        path = self.directory / "metrics.jsonl"
        try:
            require_regular(path)
            with open(path, "rb") as file:
                size, length = file.seek(0, os.SEEK_END), 65536
                while True:
                    file.seek(max(0, size - length))
                    records, _ = metrics.parse(file.read())
                    if records or length >= size:
                        return records[-1]["round"] if records else 0
                    length *= 8  # a record names all participants of its round
        except OSError:
            return 0

    def finished(self) -> bool:
        """Whether the run has all its rounds, has written its results, and is not to be overwritten."""
        rounds = finished_rounds(self.directory)
        return rounds is not None and rounds >= self.rounds and not (self.overwrite and self.changed())

    def changed(self) -> list[str]:
        """What is not as it was when the run in the directory began, unless that is accepted: a user's own code, and
        values of settings that the plan leaves to presets and defaults."""
        if self.accept_changed_code:
            return []
        try:
            record = read_json(self.directory / "config.json")
        except (OSError, ValueError):
            return []
        if not isinstance(record, dict):
            return []
        record = settings.own_settings(record)
        now = {n: v for n, v in self._settings().items() if n in record and n not in self.given}
        differ = [f"{n} from {record[n]} to {v}" for n, v in now.items() if record[n] != v]
        return [*code_digest.changed(settings.as_code(record.get(settings.CODE)), self.code), *differ]

    def _settings(self) -> dict[str, Any]:
        """Those that a run would have now, of those on which its result depends; none while its data is not there."""
        try:
            config = resolve_dataset(self.given, {})[0].config
        except UserError:
            return {}
        known = settings_of(config.algorithm)
        return {n: v for n, v in config.record().items() if not known[n].runtime and n not in ("dataset", "algorithm")}


@dataclass(frozen=True)
class Experiment:
    """An experiment, expanded into its runs."""

    name: str
    title: str
    paper: str
    runs: list[PlannedRun]


def experiments() -> list[str]:
    """The names of the experiments in this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(name: str) -> Path:
    """The file of a named experiment, or the file itself."""
    check_path(name, "the experiment")
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UserError(f"no file {path}: give a TOML file or one of {', '.join(experiments())}")
        return path
    if name not in experiments():
        hint = did_you_mean(name, experiments())
        raise UserError(
            f"unknown experiment {shortened(name)}{hint}: expected one of {', '.join(experiments())}, or FILE.toml"
        )
    return FOLDER / f"{name}.toml"


def load(name: str, runs: str = "", changes: Mapping[str, Any] | None = None) -> Experiment:
    """The grid of an experiment; ``changes`` are settings that override its file."""
    path = find(name)
    check_path(runs, "--runs")
    try:
        return _expand(path, Path(runs or Path("runs") / path.stem), changes or {})
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'--config: {path} ')}") from None


def parse_changes(texts: Sequence[str]) -> dict[str, Any]:
    """The settings of ``--set key=value``; a comma makes an axis."""
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals or not name.isidentifier():
            raise UserError(f"--set: got {text!r}, expected key=value with the name of a setting")
        changes[name] = value.split(",") if "," in value and not _takes_lists(name) else value
    return changes


def _takes_lists(name: str) -> bool:
    """Whether a list is one value of the setting."""
    return name in settings.SETTINGS and settings.SETTINGS[name].kind.startswith("list")


def _expand(path: Path, root: Path, changes: Mapping[str, Any]) -> Experiment:
    data = settings.load(path)
    for key in data:
        if key not in (keys := ("title", "paper", "base", "runs")):
            raise UserError(f"unknown key {key!r}{did_you_mean(key, keys)}, expected {', '.join(keys)}")
    base, blocks = data.get("base", {}), data.get("runs", [{}])
    if not isinstance(base, dict) or not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
        raise UserError("expected a table [base] and tables [[runs]]")
    runs: dict[str, PlannedRun] = {}
    codes: dict[str, Files] = {}
    existing = entries(root)
    for block in blocks:
        asked = {**base, **block, **changes}
        axes = frozenset(name for name, value in asked.items() if _is_axis(name, value))
        for given in _crossed(asked):
            run = plan_run(given, root, codes)
            key = run.name.text()
            first = runs.setdefault(key, run)
            if differ := [n for n, v in run.runtime.items() if v != first.runtime[n]]:
                both = f"{shown(first.runtime[differ[0]])} and {shown(run.runtime[differ[0]])}"
                raise UserError(f"{key} has {differ[0]} {both}: keep one of them")
            runs[key] = replace(first, axes=first.axes | axes)
    placed = [replace(run, directory=root / run.name.choose(run.axes, existing)) for run in runs.values()]
    return Experiment(path.stem, str(data.get("title", "")), str(data.get("paper", "")), placed)


def _is_axis(name: str, value: Any) -> bool:
    """Whether the runs of a block take these values in turn."""
    return isinstance(value, list) and (not _takes_lists(name) or any(isinstance(v, list) for v in value))


def _crossed(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every list of a block is an axis; axes are crossed, the last varies fastest."""
    axes = []
    for name, value in block.items():
        axis = _is_axis(name, value)
        if axis and not value:
            raise UserError(f"{name} is an empty list: expected at least one value")
        axes.append([(name, v) for v in value] if axis else [(name, value)])
    return [dict(choice) for choice in itertools.product(*axes)]


def plan_run(given: Mapping[str, Any], root: Path, codes: dict[str, Files]) -> PlannedRun:
    """One run; ``codes`` has the digests of names that other runs have."""
    if "out" in given:
        raise UserError("out does not belong in a grid's file: give the directory of all its runs with --runs")
    # From what is given alone: names and commands stay as they are when the data is prepared.
    values = resolve({}, given, data_known=False).config.record()
    final = values
    if not values["silo_dir"]:
        with suppress(NoShardsError):
            final = resolve_with_data({}, given).config.record()
    named = code_digest.named(values)
    for name in named.values():
        codes[name] = codes.get(name) or code_digest.of(name)
    run_name = RunName(values)
    return PlannedRun(
        {k: values[k] for k in given},
        final["rounds"],
        root / run_name.text(),
        run_name,
        {name: final[name] for name, setting in settings.SETTINGS.items() if setting.runtime},
        code={setting: codes[name] for setting, name in named.items()},
    )
