"""What first rounds and best accuracies owe to how often is evaluated, from runs that are evaluated in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..analysis import measures
from ..analysis.groups import Group, Stat, dataset_name
from ..analysis.load import RecordedRun
from ..analysis.tables import Cell, Column, Table, stat
from ..rundir.columns import ACCURACY
from . import paper

EVERY = (1, 2, 5, 10)  # rounds from one evaluation to the next
ROUNDS = 1500
NOTE = "Runs that were evaluated in every round, and the same as if it had been every 2nd, 5th or 10th only."


def tables(groups: Sequence[Group]) -> list[Table]:
    """Rounds to the paper's test accuracies, and the best accuracy; no table where no run was evaluated so often."""
    rows = []
    for one in groups:
        runs = [run for run in one.runs if run.done >= ROUNDS and _in_every_round(run)]
        if one.columns.objective != ACCURACY or not runs or one.dataset not in paper.levels():
            continue
        name = f"{dataset_name(one.dataset)}, {one.method_name}, seed{'s' * (len(runs) > 1)} "
        name += " and ".join(str(run.seed) for run in runs)
        asked = {f"rounds to {100 * lv:g} %": measures.rounds_to("test_acc", lv) for lv in paper.levels()[one.dataset]}
        for what, measure in {**asked, f"best within {ROUNDS:,}": measures.best(ROUNDS)}.items():
            found = [[measure(_thinned(run, every)) for run in runs] for every in EVERY]
            if all(value is not None and np.isfinite(value) for values in found for value in values):
                cells = [stat(Stat(tuple(filter(None, values)), len(runs)), 1) for values in found]
                rows.append([Cell(f"{name}: {what}"), *cells])
    columns = [Column("Runs", numeric=False), *(Column(f"every {n}" if n > 1 else "every round") for n in EVERY)]
    title = "First rounds and best accuracies by how often is evaluated"
    return [Table("resolution", title, columns, rows, notes=[NOTE])] if rows else []


def _in_every_round(run: RecordedRun) -> bool:
    return bool(np.isfinite(run.series["test_acc"][:ROUNDS]).all()) if "test_acc" in run.series else False


def _thinned(run: RecordedRun, every: int) -> RecordedRun:
    """The run as if it had been evaluated less often."""
    return replace(run, series={**run.series, "test_acc": np.where(run.rounds % every, np.nan, run.series["test_acc"])})
