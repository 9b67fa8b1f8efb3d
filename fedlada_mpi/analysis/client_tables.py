"""Tables of runs with --eval-clients: the spread over all clients, and the values of silos and of named clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from ..rundir.columns import LOSS, Metric
from . import measures
from .groups import Group, Stat, by_problem
from .load import RecordedRun
from .series import with_names, with_silos
from .sites import Sites, by_name, by_silo, evaluated_last
from .tables import HEAD, Cell, Column, Table, metric_cell, named, objective_cell, per_objective, plain, unit

PARTS = ("test", "train")  # of the data, on which clients are evaluated
UNDEFINED = "Clients without a value are left out: it is undefined on their examples."


def tables(groups: Sequence[Group]) -> list[Table]:
    """How the clients fare one by one, in the last round in which they were evaluated so."""
    silo_by_silo = partial(_sites, "Silo by silo", "Silo", by_silo, with_silos)
    client_by_client = partial(_sites, "Clients by name", "Client", by_name, with_names)
    made: dict[str, Callable[[Metric, list[Group]], Table]]
    made = {"clients": _spread, "silos": silo_by_silo, "clients_by_name": client_by_client}
    return [table for name, make in made.items() for table in per_objective(groups, name, make, empty=False)]


def _spread(objective: Metric, groups: Sequence[Group]) -> Table:
    """Mean, standard deviation and worst tenth of the objective over the clients that have a value."""
    parts = [part for part in PARTS if any(one.has(one.columns.spread[part][0]) for one in groups)]
    known = {(id(one), part): _known(one, part) for one in groups for part in parts}
    counted = [part for part in parts if any(have < of for (_, p), (have, of) in known.items() if p == part)]
    columns, rows = list(HEAD), []
    for part in parts:
        names = ["mean", "spread", "worst tenth", *(["clients with a value"] if part in counted else [])]
        columns += [Column(name, f"{part} {objective.title}{unit(objective)}") for name in names]
    for one, head in named(groups):
        row: list[Cell] = []
        for part in parts:
            wanted = (measures.final(name, objective.scale) for name in one.columns.spread[part])
            row += [objective_cell(one.latest(measure), one.columns) for measure in wanted]
            have, of = known[id(one), part]
            row += [Cell(f"{have} of {of}", float(have)) if of else Cell()] if part in counted else []
        if any(cell.value is not None for cell in row):
            rows.append([*head, *row])
    worst = "lowest" if objective.larger_is_better else "highest"
    notes = [
        "Over all clients, on their own examples: the mean, the standard deviation, and the mean of the tenth with the "
        f"{worst} {objective.title}."
    ]
    return Table("", "Client by client", columns, rows, notes=notes + [UNDEFINED] * bool(counted), section="results")


def _known(one: Group, part: str) -> tuple[int, int]:
    """How many clients have a value of the objective in all runs, and of how many; none where it is not recorded."""
    column = one.columns.objective.of(part)
    rows = [run.clients[column] for run in evaluated_last(one.runs) if column in run.clients]
    if not rows or len({len(row) for row in rows}) > 1:
        return 0, 0
    return int(np.isfinite(rows).all(axis=0).sum()), len(rows[0])


def _sites(
    title: str,
    site: str,
    by_site: Callable[[Sequence[RecordedRun]], Sites | None],
    shown: Callable[[Sequence[Group]], list[Group]],
    objective: Metric,
    groups: Sequence[Group],
) -> Table:
    """Objective and loss at each site of the groups that can be ``shown``."""
    chosen = [one for members in by_problem(groups).values() for one in shown(members)]
    found = {id(one): sites for one in chosen if (sites := by_site(one.runs)) is not None}
    parts = [part for part in PARTS if any(part in sites.examples for sites in found.values())]
    over = [(metric, part) for metric in dict.fromkeys((objective, LOSS)) for part in parts]
    several = any((sites.clients > 1).any() for sites in found.values())
    counted = [part for part in parts if any(_lacks(sites, objective.of(part)) for sites in found.values())]
    columns = [*HEAD, Column(site, numeric=_are_numbers(found)), *([Column("Clients")] if several else [])]
    columns += [Column(part, "examples") for part in parts]
    columns += [Column(part, f"{metric.title}{unit(metric)}") for metric, part in over]
    columns += [Column(part, "clients with a value") for part in counted if several]
    rows = []
    for one, head in named(groups):
        if id(one) not in found:
            continue
        sites = found[id(one)]
        for i, name in enumerate(sites.names):
            row = [*head, Cell(name, sort=float(sites.numbers[i])), *([plain(sites.clients[i])] if several else [])]
            row += [_number(sites.examples, part, i) for part in parts]
            for metric, part in over:
                values = metric.scale * sites.values.get(metric.of(part), np.empty((0, len(sites))))[:, i]
                value = Stat(tuple(values[np.isfinite(values)].tolist()), len(one.runs))
                row.append(metric_cell(value, metric, one.columns))
            rows.append([*row, *(_number(sites.known, objective.of(part), i) for part in counted if several)])
    notes = ["Means of the clients' values, weighted by their examples."] if several else []
    undefined = [(s, part) for part in counted for s in found.values() if _lacks(s, objective.of(part))]
    notes += dict.fromkeys(_said(sites, objective, part) for sites, part in undefined)
    return Table("", title, columns, rows, notes=notes, section="results")


def _lacks(sites: Sites, column: str) -> bool:
    """Whether some clients have no value."""
    return column in sites.known and bool((sites.known[column] < sites.clients).any())


def _said(sites: Sites, objective: Metric, part: str) -> str:
    have, of = int(sites.known[objective.of(part)].sum()), int(sites.clients.sum())
    return f"{have} of {of} clients have a {part} {objective.title}: it is undefined on the examples of the others."


def _are_numbers(found: Mapping[int, Sites]) -> bool:
    return all(name.isdecimal() for sites in found.values() for name in sites.names)


def _number(values: Mapping[str, np.ndarray], name: str, i: int) -> Cell:
    return plain(float(values[name][i]), 0) if name in values else Cell()
