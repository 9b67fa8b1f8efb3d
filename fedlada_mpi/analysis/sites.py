"""The clients' values of runs with --eval-clients, by silo and by the clients' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..rundir.client_values import TESTED
from .load import RecordedRun


def evaluated_last(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Those whose clients were evaluated in the latest round in which any of the runs' clients were."""
    known = [(_clients_at(run), run) for run in runs if run.clients]
    return [run for at, run in known if at == max(known, key=lambda pair: pair[0])[0]]


def _clients_at(run: RecordedRun) -> int:
    """The last round in which clients were evaluated one by one."""
    means = [run.series[run.columns.spread[part][0]] for part in ("test", "train")]
    return max(int(run.rounds[~np.isnan(mean)].max(initial=0)) for mean in means)


@dataclass(frozen=True, eq=False)
class Sites:
    """Silos, or clients by their names: how many examples each has, and the metrics by run and site."""

    numbers: np.ndarray
    names: list[str]
    clients: np.ndarray
    examples: dict[str, np.ndarray]  # by part of the data
    values: dict[str, np.ndarray]  # by column, [runs, sites]; NaN where undefined
    known: dict[str, np.ndarray]  # by column: how many clients have a value in all runs

    def __len__(self) -> int:
        return len(self.numbers)


def by_silo(runs: Sequence[RecordedRun]) -> Sites | None:
    """The clients' values by silo, weighted by their examples; None where they are not recorded.

    So weighted, means over examples are those of all examples of the silo. A silo of one client has its name.
    """
    runs = _alike(runs, "silos")
    if not runs:
        return None
    clients = runs[-1].clients
    numbers, place = np.unique(clients["silos"], return_inverse=True)
    names = [str(number) for number in numbers]
    if "names" in clients:
        members = [np.flatnonzero(place == i) for i in range(len(numbers))]
        names = [clients["names"][m[0]] if len(m) == 1 else n for n, m in zip(names, members, strict=True)]
    return _sites(runs, numbers, names, place)


def by_name(runs: Sequence[RecordedRun]) -> Sites | None:
    """The clients' values, where the clients have names; None where they have none."""
    runs = _alike(runs, "names")
    if not runs:
        return None
    names = runs[-1].clients["names"]
    return _sites(runs, np.arange(1, len(names) + 1), list(names), np.arange(len(names)))


def _alike(runs: Sequence[RecordedRun], name: str) -> list[RecordedRun]:
    """The runs that were evaluated last, and have the same of its clients."""
    known = [run for run in evaluated_last(runs) if name in run.clients]
    return [run for run in known if np.array_equal(run.clients[name], known[-1].clients[name])]


def _sites(runs: Sequence[RecordedRun], numbers: np.ndarray, names: list[str], place: np.ndarray) -> Sites:
    """``place`` is the site of each client."""
    clients = runs[-1].clients
    sizes = {"train": clients["images"]} | ({"test": clients[TESTED]} if TESTED in clients else {})
    values, known = {}, {}
    for part, size in sizes.items():
        for column in runs[-1].columns.of(part):
            rows = [run.clients[column] for run in runs if column in run.clients]
            if len(rows) < len(runs):
                continue
            values[column] = np.array([_weighted(row, size, place) for row in rows])
            known[column] = np.bincount(place, np.isfinite(rows).all(axis=0)).astype(int)
    examples = {part: np.bincount(place, size) for part, size in sizes.items()}
    return Sites(numbers, names, np.bincount(place), examples, values, known)


def _weighted(values: np.ndarray, sizes: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The mean at each site, over the clients that have a value."""
    weights = np.where(np.isfinite(values), sizes, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.bincount(place, weights * np.nan_to_num(values)) / np.bincount(place, weights)
