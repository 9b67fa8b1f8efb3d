"""Other settings of FedLADA and LocalAdam that were tried against the paper's curves, each with its records."""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis import measures
from ..analysis.groups import Group, show
from ..analysis.tables import Cell, Column, Table, stat
from ..rundir.columns import ACCURACY

DATASET, SHORT = "cifar10", 600  # rounds; runs of fewer have a table of their own
LEVELS, TRAINED = (0.70, 0.80, 0.84), 0.98
AFTER = (250, 600, 1500)
ANOTHER_PROBLEM = ("participation", "local_steps", "lr_schedule")  # of other experiments than the readings
PAPER = {
    "fedlada": ["FedLADA in the paper", "44.6", "186.4", "598", "765", "–", "–", "86.1", "–", "5, of 70 and 80 %", "–"],
    "localadam": ["LocalAdam in the paper", "65.5", "never", "–", "575", "–", "–", "–", "–", "5, of 70 and 80 %", "–"],
}
NOTE = (
    "Means and standard deviations over seeds; “> T”: not in the T rounds that were run. Best: of the evaluated rounds "
    "up to 1,500. The last column is the folder of the records."
)


def tables(groups: Sequence[Group]) -> list[Table]:
    """A row for each setting, by methods, and FedLADA's of few rounds apart; none where only the paper's was run."""
    fedlada, localadam = ([one for one in groups if _is_reading(one, method)] for method in PAPER)
    made: list[Table] = []
    if len(fedlada) > 1:
        long, short = ([one for one in fedlada if (one.done < SHORT) == few] for few in (False, True))
        made += _table("readings", "Readings of FedLADA, CIFAR-10", long, "fedlada")
        made += _table("readings_short", f"Readings of FedLADA, CIFAR-10, fewer than {SHORT} rounds", short)
    if len(localadam) > 1:
        long = [one for one in localadam if one.done >= SHORT]
        made += _table("readings_localadam", "Readings of LocalAdam, CIFAR-10", long, "localadam")
    return made


def _table(name: str, title: str, found: Sequence[Group], method: str = "") -> list[Table]:
    """With the paper's row of the method, if one is named; none without a setting."""
    if not found:
        return []
    columns = [
        Column("Settings", numeric=False),
        *(Column(f"{100 * level:g} %") for level in LEVELS),
        Column("98 % train"),
        *(Column(f"after {after:,}") for after in AFTER),
        *(Column("best"), Column("seeds"), Column("records", numeric=False)),
    ]
    rows = [[Cell(text) for text in PAPER[method]]] if method else []
    rows += [_row(one) for one in sorted(found, key=_order)]
    return [Table(name, title, columns, rows, notes=[NOTE])]


def _is_reading(one: Group, method: str) -> bool:
    return (
        one.dataset == DATASET
        and one.method == method
        and one.columns.objective == ACCURACY
        and not one.departures().keys() & {*ANOTHER_PROBLEM}
    )


def _changes(one: Group) -> dict[str, object]:
    return {name: value for name, value in one.departures().items() if name != "precision"}


def _order(one: Group) -> tuple[int, str]:
    """The paper's settings first, then by what differs."""
    return len(_changes(one)), _words(one)


def _words(one: Group) -> str:
    return ", ".join(show(name, value) for name, value in _changes(one).items()) or "the paper's settings"


def _row(one: Group) -> list[Cell]:
    rounds = [one.over(measures.rounds_to("test_acc", level, AFTER[-1]), AFTER[-1]) for level in LEVELS]
    rounds.append(one.over(measures.rounds_to("train_acc", TRAINED, AFTER[-1]), AFTER[-1]))
    accuracies = [one.over(measures.test_at(after)) for after in AFTER]
    folders = sorted({run.path.parent.name for run in one.runs})
    return [
        Cell(_words(one)),
        *(stat(each) for each in rounds),
        *(stat(each, 1) for each in accuracies),
        stat(one.over(measures.best(AFTER[-1])), 1),
        Cell(f"{len(one.runs)}", float(len(one.runs))),
        Cell(", ".join(folders)),
    ]
