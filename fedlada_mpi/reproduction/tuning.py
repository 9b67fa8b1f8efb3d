"""Every method at several strengths of weight decay, and the rule by which the tuned preset was chosen from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..algorithms import resolve
from ..analysis.groups import Group, dataset_name, method_name
from ..analysis.load import RecordedRun
from ..analysis.tables import Cell, Column, Table, number, plain
from ..rundir.columns import ACCURACY
from .paper import OPEN

DATASET, SETTING = "cifar10", "weight_decay"
AFTER, LAST = 150, 200  # the rounds whose test accuracies decide
NOTE = (
    f"Mean test accuracy over the evaluations after round {AFTER} and up to {LAST}, with the seeds that all runs have; "
    "the highest is chosen. Factors are of the paper's weight decay."
)


def accuracy(run: RecordedRun) -> float:
    """What decides, in per cent; NaN where the run has not got so far."""
    values = run.series["test_acc"][(run.rounds > AFTER) & (run.rounds <= LAST)]
    known = values[~np.isnan(values)]
    return 100 * float(known.mean()) if run.done >= LAST and known.size else math.nan


def measured(groups: Sequence[Group]) -> dict[str, dict[float, float]]:
    """The accuracies of the methods that were run with several decays, by method and decay."""
    found: dict[str, dict[float, list[RecordedRun]]] = {}
    for one in groups:
        if one.columns.objective != ACCURACY:
            continue
        own = one.departures()
        if one.dataset == DATASET and one.settings["preset"] == "paper" and {*own} <= {*OPEN, SETTING}:
            found.setdefault(one.method, {})[one.settings[SETTING]] = one.runs
    several = {method: runs for method, runs in found.items() if len(runs) > 1}
    seeds = [{run.seed for run in runs} for by_decay in several.values() for runs in by_decay.values()]
    common = set.intersection(*seeds) if seeds else set()
    return {
        method: {
            decay: float(np.mean([accuracy(run) for run in runs if run.seed in common]))
            for decay, runs in sorted(by_decay.items())
        }
        for method, by_decay in several.items()
        if common
    }


def chosen(groups: Sequence[Group]) -> dict[str, float]:
    """The decay of each method that the rule chooses, where all of its runs got so far."""
    return {
        method: max(by_decay, key=lambda decay: by_decay[decay])
        for method, by_decay in measured(groups).items()
        if not any(map(math.isnan, by_decay.values()))
    }


def table(groups: Sequence[Group]) -> Table:
    """Methods and factors of the paper's decay; no rows where no method was run with several."""
    found, best = measured(groups), chosen(groups)
    presets = {m: resolve({"dataset": DATASET, "algorithm": m}).config.weight_decay for m in found}
    factors = sorted({round(decay / presets[m], 6) for m, by_decay in found.items() for decay in by_decay})
    rows = []
    for i, (method, by_decay) in enumerate(found.items()):
        values = {round(decay / presets[method], 6): value for decay, value in by_decay.items()}
        rows.append(
            [
                Cell(method_name(method), sort=float(i)),
                plain(presets[method], 3),
                *(plain(values.get(factor), 2) for factor in factors),
                Cell(number(best[method], 3), best[method]) if method in best else Cell(),
            ]
        )
    columns = [
        *(Column("Method", numeric=False), Column("paper's decay")),
        *(Column(f"× {factor:g}") for factor in factors),
        Column("chosen"),
    ]
    return Table("tuning", f"Weight decay, {dataset_name(DATASET)}", columns, rows, notes=[NOTE])
