"""How many cells of the paper's tables our runs agree with, by table: the baselines and FedLADA apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..analysis.groups import method_name
from ..analysis.tables import Cell, Column, Table

OWN = method_name("fedlada")
# One count for each number of the paper: tables that repeat others are left out.
COUNTED = ("rounds_to_train_98", "rounds_to_test_high", "rounds_to_test", "accuracy_1500", "simulator")
NOTE = (
    "Cells with a number of the paper's and runs of ours that all have a value, factors left out. Within: not more "
    "than a twentieth of the paper's rounds or half a point away, or never in both; accuracies once after 1,500 rounds "
    "and once as the best until then. Ahead: fewer rounds or a higher accuracy, which is no agreement either."
)


def table(of_paper: Sequence[Table]) -> Table:
    """Counts of cells that are within, ahead and behind."""
    rows = []
    totals: dict[str, list[int]] = {}
    for one in of_paper:
        if one.id in COUNTED:
            for name, own in (("baselines", False), (OWN, True)):
                counts = _counts(one, own)
                if sum(counts):
                    rows.append(_row(f"{one.title}: {name}", counts))
                    totals[name] = [a + b for a, b in zip(totals.get(name, [0, 0, 0]), counts, strict=True)]
    rows += [_row(f"All: {name}", counts) for name, counts in totals.items()]
    columns = [Column("Table", numeric=False), *map(Column, ("cells", "within", "ours ahead", "ours behind"))]
    return Table("agreement", "How many cells agree with the paper", columns, rows, notes=[NOTE])


def _counts(one: Table, own: bool) -> list[int]:
    """Cells within, ahead and behind; those of FedLADA, or all others."""
    differences = [
        row[i]
        for row in one.rows
        if (row[0].text == OWN) == own
        for i, column in enumerate(one.columns)
        if column.name == "difference" and not column.over.endswith("factor")
    ]
    judged = [cell for cell in differences if cell.value is not None or cell.sort is not None]
    return [sum(cell.tone == tone for cell in judged) for tone in ("", "better", "worse")]


def _row(name: str, counts: Iterable[int]) -> list[Cell]:
    known = list(counts)
    return [Cell(name), *(Cell(f"{count:,}", float(count)) for count in (sum(known), *known))]
