"""Trials with one hostile input each: a strategy that draws it, and a function that tries it.

A trial says how the input was taken, and raises where the package does anything but what it promises: an answer, or a
UserError of one line.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_checkpoint
from hostile import Damage, damages, one_line, texts, values
from hypothesis import strategies as st

from fedlada_mpi import run
from fedlada_mpi.algorithms import Vectors
from fedlada_mpi.data.datasets import resolve_dataset
from fedlada_mpi.mpi import World
from fedlada_mpi.rundir import checkpoint, metrics
from fedlada_mpi.rundir.columns import CLASSIFICATION
from fedlada_mpi.session.console import closing_lines
from fedlada_mpi.settings import SETTINGS, Config, flag, load
from fedlada_mpi.support.errors import UserError


def outcome(action: Callable[[], object]) -> str:
    message = ""
    try:
        action()
    except UserError as error:
        message = str(error)
    assert not message or one_line(message), message
    return "refused" if message else "accepted"


# Command lines.

SWITCHES = ("resume", "overwrite", "print_config", "server_trains", "no_server_trains")
flags = st.lists(st.tuples(st.sampled_from([*SETTINGS, *SWITCHES, "config"]), texts), max_size=4)


def try_flags(given: Sequence[tuple[str, str]]) -> str:
    """Flags end in settings, in argparse's own message, or in one line."""
    line = [f"--{flag(name)}" if name in SWITCHES else f"--{flag(name)}={text}" for name, text in given]
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            # Reads the file of --config, which may name the method.
            return outcome(lambda: run.parse(line)[0].resolve()[0].table().encode())
        except SystemExit:
            assert "error: " in printed.getvalue()
            return "argparse"


# Settings files.


def to_toml(table: dict[str, Any]) -> bytes:
    """The table with JSON's values, most of which are TOML's too."""
    return "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in table.items()).encode()


def to_json(table: dict[str, Any]) -> bytes:
    return json.dumps(table).encode()


names = st.one_of(st.sampled_from(sorted(SETTINGS)), st.text(max_size=5))
settings_files = st.builds(
    lambda table, write, damage: (write.__name__[3:], damage(write(table))),
    st.dictionaries(names, values, max_size=3),
    st.sampled_from([to_toml, to_json]),
    st.one_of(st.just(bytes), damages()),
)


def try_settings(file: tuple[str, bytes], folder: Path) -> str:
    """A settings file is read and checked, or refused in one line."""
    suffix, content = file
    path = folder / f"settings.{suffix}"
    path.write_bytes(content)
    return outcome(lambda: resolve_dataset({}, load(path)))


# metrics.jsonl.


def recorded(number: int, **changes: Any) -> dict[str, Any]:
    """The record of a round as a run writes it, with changes."""
    return {
        "round": number,
        **dict.fromkeys(CLASSIFICATION.numbers, 0.5),
        "participants": [0, 3],
        "seconds": dict.fromkeys(metrics.ALL_PHASES, 0.1),
        "seconds_by_rank": {"train": [0.1, 0.2], "wait": [0.0, 0.1]},
        **changes,
    }


numbers = (*CLASSIFICATION.numbers, *CLASSIFICATION.optional)
keys = st.sampled_from([*numbers, "round", "participants", "seconds", "seconds_by_rank", "x"])
lines = st.builds(
    lambda number, changes, damage: damage(to_json({**recorded(number), **changes})) + b"\n",
    st.integers(-1, 8),
    st.dictionaries(keys, st.one_of(st.none(), values), max_size=2),
    st.one_of(st.just(bytes), st.just(bytes), damages()),
)
metrics_files = st.builds(
    lambda parts, damage: damage(b"".join(parts)), st.lists(lines, max_size=6), st.one_of(st.just(bytes), damages())
)


def try_metrics(content: bytes, folder: Path) -> str:
    """A resumed run goes on from any metrics file; what it keeps makes a summary, and is read back in full."""
    (folder / "metrics.jsonl").write_bytes(content)
    with metrics.Recorder(folder, resumed_at=5) as recorder:
        recorder.add(recorded(6))
    rounds = [record["round"] for record in recorder.records]
    assert rounds == sorted(set(rounds))
    summary = {"status": "finished", **metrics.summarise(recorder.records, [0.5])}
    closing_lines(summary, recorder.records, "out")
    kept, skipped = metrics.parse((folder / "metrics.jsonl").read_bytes())
    assert (len(kept), skipped) == (len(rounds), 0)
    return "lines left out" if recorder.left_out else "all lines kept"


# Run directories, for a report.

run_files = st.fixed_dictionaries(
    {
        "config.json": st.builds(
            lambda table, damage: damage(to_json({"rounds": 3, "algorithm": "fedavg", **table})),
            st.dictionaries(st.sampled_from(sorted(SETTINGS)), values, max_size=2),
            st.one_of(st.just(bytes), st.just(bytes), damages()),
        ),
        "metrics.jsonl": metrics_files,
        "summary.json": st.builds(
            lambda status, damage: damage(to_json({"status": status})), values, st.one_of(st.just(bytes), damages())
        ),
    }
)


def try_report(files: dict[str, bytes], folder: Path) -> str:
    """A run directory makes a page with tables, or is left out for a reason."""
    from fedlada_mpi.analysis import load as runs
    from fedlada_mpi.analysis import page, run_tables
    from fedlada_mpi.analysis.groups import group
    from fedlada_mpi.reproduction import comparison, figures, paper

    for name, content in files.items():
        (folder / name).write_bytes(content)

    def report() -> None:
        groups = group(runs.read_all([folder], skip_broken=True)[0])
        levels = run_tables.levels(groups, paper.levels())
        made = [*comparison.tables(groups), *run_tables.overview(groups), *run_tables.targets(groups, levels)]
        made += [run_tables.phases(groups), *run_tables.runs(groups)]
        text = "".join(table.csv() + table.markdown() for table in made)
        panels = {figure.id: figure.panels for figure in figures.figures(groups)}
        (text + page.render(groups, made, [], "runs") + page._embedded(page._data(groups, panels))).encode()

    return outcome(report)


# Checkpoints.

checkpoint_files = st.tuples(st.sampled_from(["server.h5", "clients_0000.h5", checkpoint.LIST]), damages())


def write_checkpoint(world: World, out: Path) -> Path:
    """The checkpoint that ``try_checkpoint`` damages."""
    s = Vectors(x=torch.arange(5.0), c=torch.zeros(5))
    save_checkpoint(world, out, 7, Config(), s, {"c_i": {3: torch.full((5,), 3.0), 11: torch.full((5,), 11.0)}})
    return out


def try_checkpoint(drawn: tuple[str, Damage], world: World, original: Path, folder: Path) -> str:
    """A file of a checkpoint that differs in any bit is refused in one line."""
    name, damage = drawn
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    (newest,) = checkpoint.complete(folder)
    before = (newest / name).read_bytes()
    content = damage(before)
    (newest / name).write_bytes(content)
    found = outcome(lambda: restore(world, folder))
    # The list may be written otherwise and still be the same list.
    assert found == "refused" or content == before or json.loads(content) == json.loads(before)
    return found


def restore(world: World, out: Path) -> None:
    """What ``--resume`` reads of the checkpoint, which must be what was written."""
    t = checkpoint.latest(out, Config())
    s, state = Vectors(x=torch.zeros(5), c=torch.zeros(5)), {"c_i": dict[int, torch.Tensor]()}
    checkpoint.load(out, t, s, state, {3, 11}, world)
    assert s.x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {client: row.tolist() for client, row in state["c_i"].items()} == {3: [3.0] * 5, 11: [11.0] * 5}
