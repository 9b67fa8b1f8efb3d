"""Trials with one hostile input each; a trial raises where the package does anything but what it promises."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostile import Damage, one_line

from fedlada_mpi import run
from fedlada_mpi.config import FIELDS, Config, flag, load, resolve
from fedlada_mpi.data.datasets import settle
from fedlada_mpi.errors import UserError
from fedlada_mpi.rundir import metrics

SWITCHES = ("resume", "overwrite", "print_config", "server_trains", "no_server_trains")


def outcome(action: Any) -> str:
    """``accepted``, or ``refused`` with one line; any other exception passes."""
    try:
        action()
    except UserError as error:
        assert one_line(str(error)), str(error)
        return "refused"
    return "accepted"


def words(flags: Sequence[tuple[str, str]]) -> list[str]:
    """A command line of flags with their values, and of switches."""
    line = []
    for name, text in flags:
        line += [f"--{flag(name)}"] if name in SWITCHES else [f"--{flag(name)}={text}"]
    return line


def try_flags(line: list[str]) -> str:
    """A command line ends in settings, in argparse's own message, or in one line."""
    try:
        options, flags = run.parse(line)
    except SystemExit as error:
        assert error.code == 2
        return "argparse"

    def settled() -> None:
        resolved, _ = run._settle(options, flags)
        assert isinstance(resolved.config, Config)
        resolved.table().encode()  # as --print-config does

    return outcome(settled)


def try_settings(path: Path, content: bytes) -> str:
    """A settings file is read and checked, or refused in one line."""
    path.write_bytes(content)
    return outcome(lambda: settle({}, load(path)))


def to_toml(table: dict[str, Any]) -> bytes:
    """The table with JSON's values, most of which are TOML's too."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items()).encode()


def recorded(**changes: Any) -> dict[str, Any]:
    """A record of a round as a run writes it, with changes."""
    numbers = {name: 0.5 for name in metrics.NUMBERS}
    seconds = dict.fromkeys(metrics.ALL_PHASES, 0.1)
    by_rank = {"train": [0.1, 0.2], "wait": [0.0, 0.1]}
    return {"round": 1, **numbers, "participants": [0, 3], "seconds": seconds, "seconds_by_rank": by_rank, **changes}


def try_metrics(folder: Path, content: bytes) -> str:
    """A resumed run goes on from any metrics file; what it keeps makes a summary, and is read back in full."""
    from fedlada_mpi.console import closing_lines

    (folder / "metrics.jsonl").write_bytes(content)
    recorder = metrics.Recorder(folder, resumed_at=5)
    recorder.add(recorded(round=6))
    recorder.close()
    rounds = [record["round"] for record in recorder.records]
    assert rounds == sorted(set(rounds))
    summary = {"status": "finished", **metrics.summarise(recorder.records, [0.5])}
    closing_lines(summary, recorder.records, "out")
    kept, skipped = metrics.parse((folder / "metrics.jsonl").read_bytes())
    assert (len(kept), skipped) == (len(rounds), 0)
    return "left out" if recorder.left_out else "kept"


def try_report(directory: Path) -> str:
    """A run directory makes a page with tables, or is left out for a reason."""
    from fedlada_mpi.report import load as runs
    from fedlada_mpi.report import page, paper, tables
    from fedlada_mpi.report.groups import group

    def report() -> None:
        loaded, _ = runs.read_all([directory])
        groups = group(loaded)
        levels = tables.levels(groups, paper.levels())
        made = [*paper.tables(groups), tables.overview(groups), *tables.targets(groups, levels)]
        made += [tables.phases(groups), tables.runs(groups)]
        text = "".join(table.csv() + table.markdown() for table in made)
        (text + page.render(groups, made, [], "runs")).encode()
        page._embedded(page._data(groups))

    return outcome(report)


def try_checkpoint(original: Path, folder: Path, name: str, damage: Damage, world: Any) -> str:
    """A changed file of a checkpoint is refused in one line; one that is as it was loads."""
    import torch

    from fedlada_mpi.algorithms import Vectors
    from fedlada_mpi.rundir import checkpoint

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    (newest,) = checkpoint.complete(folder)
    before = (newest / name).read_bytes()
    content = damage(before)
    (newest / name).write_bytes(content)

    def resume() -> None:
        t = checkpoint.latest(folder, Config())
        s = Vectors(x=torch.zeros(5), c=torch.zeros(5))
        state: dict[str, dict[int, torch.Tensor]] = {"c_i": {}}
        checkpoint.load(folder, t, s, state, {3, 11}, world)
        assert s.x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert {client: row.tolist() for client, row in state["c_i"].items()} == {3: [3.0] * 5, 11: [11.0] * 5}

    found = outcome(resume)
    assert found == "refused" or content == before or name == checkpoint.LIST
    return found


def write_checkpoint(out: Path, world: Any) -> Path:
    """A checkpoint for ``try_checkpoint``."""
    import torch

    from fedlada_mpi.algorithms import Vectors
    from fedlada_mpi.rundir import checkpoint

    s = Vectors(x=torch.arange(5.0), c=torch.zeros(5))
    checkpoint.save(world, out, 7, Config(), s, {"c_i": {3: torch.full((5,), 3.0), 11: torch.full((5,), 11.0)}})
    return out


def without_checksums(out: Path) -> Path:
    """The checkpoint as version 0.1.0 wrote it."""
    from fedlada_mpi.rundir import checkpoint

    (newest,) = checkpoint.complete(out)
    names = json.loads((newest / checkpoint.LIST).read_text())
    (newest / checkpoint.LIST).write_text(json.dumps(sorted(names)))
    return out


def default_settings() -> dict[str, Any]:
    return vars(resolve({"algorithm": "fedavg"}).config)


ALL_FLAGS = (*FIELDS, *SWITCHES, "config")
HERE = Path(os.curdir)
