"""Reading run directories, finished or in progress."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import algorithms, settings
from ..experiments import names, titles
from ..rundir import client_values, data_digest, metrics, results
from ..rundir.columns import ALL_PHASES, CLASSIFICATION, Columns, recorded
from ..rundir.metrics import parse
from ..support import code_digest
from ..support.errors import UserError, printable
from ..support.inputs import check_path, read_json, reason
from ..support.processes import process_map, usable_cores
from . import usage

WORTH_A_PROCESS = 20_000_000  # bytes of metrics; fewer are read before another process has started
DIVERGED = "diverged"  # the status of a run that left the finite numbers
LONGEST = 200  # characters of a name
OWN_TESTS = "client_tests"  # in the summary of a packed run: its clients have test examples of their own
UNPACKED = 15  # bytes that a packed byte becomes, about


@dataclass
class RecordedRun:
    """One run: its settings and, for each round done, the value of every metric (NaN where there is none).

    ``columns`` are the metrics of its task, one of which is its objective.
    """

    path: Path
    settings: dict[str, Any]
    rounds: np.ndarray
    series: dict[str, np.ndarray]
    by_rank: dict[str, np.ndarray] = field(default_factory=dict)
    status: str = "unfinished"
    method: str = ""  # the label of a user's own, where the run has recorded it
    code: str = ""  # a short digest of a user's own method and model, where the run has recorded it
    epsilon: float | None = None  # spent by the end of the run, where it has recorded that
    data: str = ""  # a short digest of the data, where the run has recorded it
    skipped: int = 0
    columns: Columns = CLASSIFICATION
    clients: dict[str, np.ndarray] = field(default_factory=dict)  # each one's values, where they were last evaluated
    own_tests: bool = False  # whether clients have test examples of their own
    damaged: str = ""  # a file that could not be read, and why
    environment: dict[str, str] = field(default_factory=dict)  # device, versions and commit, as far as recorded
    ran_on: str = ""  # ranks, nodes, devices and versions, where the run has recorded them
    usage: usage.Usage = field(default_factory=usage.Usage)
    left: dict[int, int] = field(default_factory=dict)  # how many ranks were lost before which round
    named: frozenset[str] = frozenset()  # settings that its directory names or, of a user's own method, its command

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def done(self) -> int:
        return int(self.rounds[-1]) if self.rounds.size else 0

    @property
    def complete(self) -> bool:
        """Whether no more rounds are to come."""
        return self.status == "finished" or self.done >= self.settings["rounds"]


def find(paths: Sequence[str | os.PathLike]) -> tuple[list[Path], list[str]]:
    """The run directories at or under the paths, in order, each once; and a message for each that cannot be entered.

    A path that is not there is a typing error, and refused.
    """
    directories: dict[Path, None] = {}
    problems: list[str] = []

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename} cannot be read: {reason(error)}")

    for start in [os.fspath(path) for path in paths]:
        check_path(start, "RUNS")
        if not os.path.isdir(start):
            raise UserError(f"there is no directory {start}: give run directories, or directories that contain them")
        for directory, below, files in os.walk(start, onerror=unreadable):
            below.sort()
            # Also where something else bears the name of a run's file: it is then left out with that reason.
            if {"config.json", metrics.METRICS, metrics.PACKED} & {*files, *below}:
                directories[Path(directory)] = None
                below.clear()
    if not directories:
        where = ", ".join(map(str, paths))
        none = f"no runs under {where} (looked for config.json): start one with python -m fedlada_mpi.run"
        raise UserError(problems[0] if problems else none)
    return list(directories), problems


def read_all(paths: Sequence[str | os.PathLike], skip_broken: bool = False) -> tuple[list[RecordedRun], list[str]]:
    """All runs at or under the paths; with ``skip_broken`` also a message for each that cannot be read, which is an
    error otherwise."""
    directories, problems = find(paths)
    workers = min(usable_cores(), _metrics_bytes(directories) // WORTH_A_PROCESS)
    results = list(process_map(_read_or_explain, directories, workers))
    runs = [result for result in results if isinstance(result, RecordedRun)]
    problems += [result for result in results if isinstance(result, str)]
    if problems and not (skip_broken and runs):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        hint = ": repair or remove it, or leave out what cannot be read with --skip-broken" if runs else ""
        raise UserError(problems[0] + more + hint)
    return runs, problems


def _metrics_bytes(directories: Iterable[Path]) -> int:
    sizes = {metrics.METRICS: 1, metrics.PACKED: UNPACKED}
    files = ((directory / name, times) for directory in directories for name, times in sizes.items())
    return sum(times * file.stat().st_size for file, times in files if file.is_file())


def _read_or_explain(directory: Path) -> RecordedRun | str:
    try:
        return read(directory)
    except UserError as error:
        return str(error)


def read(directory: Path) -> RecordedRun:
    """One run; what it has not written yet is empty."""
    values, columns = _settings(directory / "config.json")
    try:
        records, skipped = parse(metrics.read(directory), columns)
    except FileNotFoundError:
        records, skipped = [], 0
    except OSError as error:
        raise UserError(f"{directory / metrics.METRICS} cannot be read: {reason(error)}") from None
    rounds, series = _series(records, columns)
    run = RecordedRun(directory, values, rounds, series, _by_rank(records), skipped=skipped, columns=columns)
    run.code = code_digest.summary(settings.recorded_code(directory / "config.json"))
    run.named = frozenset(names.named(directory.resolve().name, values))
    run.left = {r["round"]: len(r["left"]) for r in records if isinstance(r.get("left"), list)}
    try:
        run.clients = client_values.latest(directory / client_values.CLIENTS, run.done)
        if "names" in run.clients:
            run.clients["names"] = np.array([label(name) for name in run.clients["names"]], object)
    except FileNotFoundError:
        pass
    except ValueError as error:
        run.damaged = f"unreadable {client_values.CLIENTS} ({printable(str(error))})"
    summary: Any = None
    try:
        summary = read_json(directory / "summary.json")
        run.status = label(str(summary["status"]))
        run.method = label(str(summary.get("method", "")))
        if values["algorithm"] not in algorithms.names():
            run.named |= _options(summary) & (values.keys() - settings.SETTINGS.keys())
        run.ran_on = printable(_ran_on(summary))[:200]
        run.usage = usage.of(summary)
        run.environment = _environment(summary, run.usage.device)
        run.own_tests = summary.get(OWN_TESTS) is True
        run.epsilon = _epsilon(summary, run.done)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, LookupError):
        run.status = "unreadable summary"
    if run.status == "finished" and _summary_rounds(summary) < run.done:
        run.status = "unfinished"  # it is being resumed
    if results.diverged_after(directory) == run.done:
        run.status = DIVERGED
    run.data = printable(data_digest.of_run(directory, summary)[:8])
    return _without_reweighted(run)


def _without_reweighted(run: RecordedRun) -> RecordedRun:
    """The run without what earlier versions recorded as a client's test accuracy: that of the classes on everybody's
    test images, weighted by the client's labels. It says nothing of the client that its labels do not say."""
    run.own_tests |= client_values.TESTED in run.clients or run.columns != CLASSIFICATION
    if not run.own_tests:
        run.clients = {name: values for name, values in run.clients.items() if not name.startswith("test_")}
        run.series |= {name: np.full(len(run.rounds), np.nan) for name in run.columns.spread["test"]}
    return run


def _environment(summary: dict[str, Any], device: str) -> dict[str, str]:
    """Device, versions and commit of the last segment, as far as the run has recorded them."""
    segments = summary.get("segments")
    parts = [summary.get("environment"), segments[-1] if isinstance(segments, list) and segments else {}]
    last = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
    known = {name: last.get(name) for name in ("ranks", "transport", "fedlada_mpi", "python", "torch", "mpi")}
    commit = str(last.get("commit") or "")[:8]
    known |= {
        "device": device or last.get("device"),
        "commit": commit + " modified" * bool(commit and last.get("modified")),
    }
    return {name: printable(str(value))[:100] for name, value in known.items() if value}


def _summary_rounds(summary: dict[str, Any]) -> float:
    rounds = summary.get("rounds")
    return rounds if isinstance(rounds, int) else math.inf


def _epsilon(summary: dict[str, Any], done: int) -> float | None:
    """What a private run has spent, where its summary is that of all ``done`` rounds."""
    privacy, rounds = summary.get("privacy"), summary.get("rounds")
    spent = privacy.get("epsilon") if isinstance(privacy, dict) and rounds == done else None
    return float(spent) if isinstance(spent, (int, float)) and math.isfinite(spent) else None


def _options(summary: dict[str, Any]) -> set[str]:
    """The settings in the command that the run was started with last."""
    environment = summary.get("environment")
    command = environment.get("command") if isinstance(environment, dict) else None
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    options = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return options | {name.removeprefix("no_") for name in options}


def _ran_on(summary: dict[str, Any]) -> str:
    """In a few words, what the run ran on last, and in how many segments it was computed."""
    try:
        segments, last = summary.get("segments") or [], usage.last_segment(summary)
        devices = dict.fromkeys(device for node in last["nodes"].values() for device in node["devices"])
        ranks, nodes = last["ranks"], len(last["nodes"])
        words = [f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}", *map(str, devices)]
        commit = f" at {str(last['commit'])[:8]}{' modified' * bool(last['modified'])}" if last["commit"] else ""
        words.append(f"version {last['fedlada_mpi']}{commit}")
        return ", ".join([*words, f"{len(segments)} segments"] if len(segments) > 1 else words)
    except (TypeError, AttributeError, LookupError):
        return ""  # of an earlier version, or not as a run writes it


def _settings(path: Path) -> tuple[dict[str, Any], Columns]:
    """The settings of a run, in their types, and the columns of its metrics; settings that its version did not have
    are the defaults."""
    try:
        given = read_json(path)
        if not isinstance(given, dict):
            raise ValueError(f"got {type(given).__name__}, expected settings by name")
        given = settings.own_settings(given)
        known = {n: settings.coerce(setting, given[n]) for n, setting in settings.SETTINGS.items() if n in given}
        known |= algorithms.recorded_hypers(known.get("algorithm", ""), given)
        columns = _named_for_people(recorded(given))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from None
    except (ValueError, UserError) as error:
        raise UserError(f"{path} cannot be read as settings: {error}") from None
    values = {**settings.Config().record(), **known}
    values["targets"] = [target for target in values["targets"] if _can_be_reached(target, columns)]
    return {name: label(value) if isinstance(value, str) else value for name, value in values.items()}, columns


def _named_for_people(columns: Columns) -> Columns:
    """The columns with titles as reports show them."""
    metrics_of = {metric.name: replace(metric, title=label(metric.title)) for metric in columns.metrics}
    return Columns(tuple(metrics_of.values()), metrics_of[columns.objective.name])


def _can_be_reached(target: float, columns: Columns) -> bool:
    if columns.objective.percent:
        return 0 < target <= 1
    return math.isfinite(target) and abs(target) <= metrics.MOST


def title(runs: Iterable[RecordedRun]) -> str:
    """That of the plan whose runs these are; empty where they are of several plans, or of none."""
    return label(titles.common(run.path.resolve().parent for run in runs))


def label(text: str) -> str:
    """A name as reports show it: printable; a long one is cut, and told apart from others by a hash."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 9]}…{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"
    return printable(text)


def _series(
    records: Sequence[dict[str, Any]], columns: Columns = CLASSIFICATION
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The rounds, and every metric as an array over them."""
    rounds = np.array([r["round"] for r in records], dtype=np.int64)
    series = {name: _numbers([r.get(name) for r in records]) for name in (*columns.numbers, *columns.optional)}
    seconds = [r.get("seconds") or {} for r in records]
    for phase in ALL_PHASES:
        series[f"seconds_{phase}"] = _numbers([s.get(phase) for s in seconds])
    series["participants"] = _numbers([_count(r.get("participants")) for r in records])
    return rounds, series


def _count(participants: list[int] | int | None) -> int:
    """How many there were; packed metrics have only this number."""
    return participants if isinstance(participants, int) else len(participants or ())


def _numbers(values: Sequence[Any]) -> np.ndarray:
    """The values as an array; NaN where there is none, or where it is not finite."""
    array = np.array(values, dtype=np.float64)
    array[np.isinf(array)] = np.nan
    return array


def _by_rank(records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Mean seconds per round of each rank, over the rounds with the latest number of ranks."""
    means = {}
    for name in ("train", "wait"):
        per_round: list[list[float]] = [(r.get("seconds_by_rank") or {}).get(name) or [] for r in records]
        rows = [row for row in per_round if row]
        if rows:
            means[name] = np.nan_to_num(_numbers([row for row in rows if len(row) == len(rows[-1])]).mean(axis=0))
    return means
