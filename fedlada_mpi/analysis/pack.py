"""Records of runs for others to read: settings, summary and packed metrics, without the traces of a machine.

    python -m fedlada_mpi.report runs/main --pack docs/reproduction/runs

A record of 1,500 rounds takes about 45 kB, and the report reads it like the run itself. Left out are the lists of
participants, which follow from the seed (their number stays), clients.h5, the model, checkpoints and logs. Numbers keep
6 significant digits, seconds 3. Directories are cut off paths, nodes are numbered.
"""

from __future__ import annotations

import lzma
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .. import algorithms
from ..rundir import client_values, metrics
from ..rundir.files import to_json
from ..rundir.results import DIVERGED, SUMMARY
from ..settings import CODE, COLUMNS, SETTINGS, own_settings
from ..support import disk
from ..support.errors import UserError, printable
from ..support.inputs import check_path, read_json
from . import load, usage

DIGITS, DIGITS_OF_SECONDS = 6, 3
# A path from the root or from a home directory, at the start of a word or of an option's value.
_PATH = re.compile(r"""(?<![^\s=:,'"(\[])(?:~[^/\s]*)?/(?:[^/\s'",\]]+/)*([^/\s'",\]]*)""")


def pack(runs: Sequence[str | os.PathLike], out: str | os.PathLike, skip_broken: bool = False) -> list[str]:
    """Write the records of the run directories at or under ``runs``; returns messages for the user."""
    check_path(os.fspath(out), "--pack")
    found, problems = load.read_all(runs, skip_broken)
    by_name: dict[str, load.RecordedRun] = {}
    for run in found:
        name = run.path.resolve().name
        if name in by_name:
            raise UserError(f"--pack: {by_name[name].path} and {run.path} have the same name: rename one of them")
        if run.path.resolve() == Path(out, name).resolve() and (run.path / metrics.METRICS).exists():
            raise UserError(f"--pack: got {out}, where {name} itself is: give another directory for the records")
        by_name[name] = run
    if any((Path(out) / name).exists() for name in ("config.json", metrics.METRICS, metrics.PACKED)):
        raise UserError(f"--pack: got {out}, which is a run: give another directory for the records")
    shared = usage.at_once([run.usage for run in found])
    records = {name: _record(run, name, at_once) for (name, run), at_once in zip(by_name.items(), shared, strict=True)}
    _write(records, Path(out))
    mean = sum(len(content) for files in records.values() for content in files.values()) / len(records) / 1000
    count = f"{len(by_name)} record{'s' * (len(by_name) != 1)}"
    left_out = [f"left out: {problem}" for problem in problems]
    return [*map(printable, left_out), printable(f"{count}, {mean:,.0f} kB each: {out}")]


def _write(records: Mapping[str, Mapping[str, bytes]], out: Path) -> None:
    """All records or, where one cannot be written, none: files get their names when all are on the disk."""
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".pack-", dir=out) as stage:
        for name, files in records.items():
            Path(stage, name).mkdir()
            (out / name).mkdir(exist_ok=True)
            for file, content in files.items():
                disk.write_new(Path(stage, name, file), content)
        for name, files in records.items():
            for file in files:
                Path(stage, name, file).replace(out / name / file)
            for file in {SUMMARY, DIVERGED} - files.keys():  # of an earlier record
                (out / name / file).unlink(missing_ok=True)


def _record(run: load.RecordedRun, name: str, at_once: float | None) -> dict[str, bytes]:
    """The files of the record of one run."""
    settings = own_settings(read_json(run.path / "config.json"))
    try:
        summary = read_json(run.path / SUMMARY)
    except (OSError, ValueError):
        summary = None
    nodes = _nodes(summary)
    # Version 0.1.0 wrote the settings of all methods.
    known = {*SETTINGS, CODE, COLUMNS, *algorithms.recorded_hypers(settings.get("algorithm", ""), settings)}
    own = {n: _named(v) for n, v in settings.items() if n in known} | {"out": f"runs/{name}", "data_dir": ""}
    files = {"config.json": to_json(_anonymous(own, nodes), 2) + "\n"}
    if isinstance(summary, dict):
        shared: dict[str, Any] = {} if at_once is None else {"runs_at_once": round(at_once, 2)}
        if client_values.TESTED in run.clients:  # which the report reads from clients.h5
            shared[load.OWN_TESTS] = True
        files[SUMMARY] = to_json(_anonymous({**summary, **shared}, nodes), 2) + "\n"
    if run.status == load.DIVERGED:
        files[DIVERGED] = to_json({"rounds": run.done}) + "\n"
    try:
        records, _ = metrics.parse(metrics.read(run.path), run.columns)
    except FileNotFoundError:
        records = []
    lines = "".join(to_json(_shortened(record)) + "\n" for record in records)
    packed = lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)
    return {**{file: text.encode() for file, text in files.items()}, metrics.PACKED: packed}


def _shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """A round's record as it is kept."""
    short = {n: _rounded(v, DIGITS_OF_SECONDS if n.startswith("seconds") else DIGITS) for n, v in record.items()}
    participants = record.get("participants")
    return {**short, "participants": len(participants)} if isinstance(participants, list) else short


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _nodes(summary: Any) -> dict[str, str]:
    """The host names that a summary has, with and without their domains, and the numbers that take their place."""
    if not isinstance(summary, dict):
        return {}
    known = [part for part in (summary.get("environment"), *(summary.get("segments") or [])) if isinstance(part, dict)]
    names = (name for part in known for name in (*(part.get("nodes") or {}), part.get("host")) if name)
    numbered = {name: f"node{i}" for i, name in enumerate(dict.fromkeys(map(str, names)))}
    short = {host: number for name, number in numbered.items() if not (host := name.partition(".")[0]).isdecimal()}
    return {**numbered, **{host: number for host, number in short.items() if host not in numbered}}


def _named(value: Any) -> Any:
    """A setting or an argument of a command, without the directories of its path."""
    return re.sub(r"[^\s=]*/", "", value) if isinstance(value, str) else value


def _anonymous(value: Any, nodes: Mapping[str, str]) -> Any:
    """The value without directories and host names, in texts and in names at any depth."""
    if isinstance(value, Mapping):
        plain = {n: [*map(_named, v)] if n == "command" and isinstance(v, list) else v for n, v in value.items()}
        if isinstance(plain.get("gpus"), list):
            plain["gpus"] = [f"gpu{i}" for i in range(len(plain["gpus"]))]
        return {_anonymous(name, nodes): _anonymous(item, nodes) for name, item in plain.items()}
    if isinstance(value, list):
        return [_anonymous(item, nodes) for item in value]
    if not isinstance(value, str):
        return value
    text = _PATH.sub(r"\1", value)
    for host, name in nodes.items():
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", name, text)
    return text
