"""The study of one paper: its tables, figures and claims with our runs next to them.

``analysis`` compares any runs with each other; everything here knows the paper, whose values are in paper.toml.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.groups import Group
from ..analysis.tables import Table
from . import claims, comparison, readings, regime, speedup, tuning


def tables(groups: Sequence[Group]) -> list[Table]:
    """All tables of the study."""
    tuned = tuning.table(groups)
    return [
        *claims.tables(groups),
        *comparison.tables(groups),
        *([tuned] if tuned.rows else []),
        *readings.tables(groups),
        *speedup.tables(groups),
        *regime.tables(groups),
    ]
