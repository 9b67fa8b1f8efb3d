"""Whether means differ: paired over the seeds that two groups have in common.

A seed fixes the participants, the batches and the initialisation, so that the difference of two groups with the same
seed varies less than either. d is the mean of these differences and s their standard deviation over n seeds; the
interval is d ± t s / √n with Student's t of n − 1 degrees of freedom, and p that of the paired t-test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..rundir.columns import Metric
from .groups import Group, labels, problems
from .load import RecordedRun
from .tables import Cell, Column, Table, decimals, number, plain

FEWEST = 3  # seeds in common; with two, the interval is 13 standard errors wide
LEVEL = 0.95
SAME = "the same in all seeds"


class Difference(NamedTuple):
    """Ours minus the other's objective on the test data, an accuracy in points, after ``last`` rounds, over so many
    seeds in common."""

    last: int
    seeds: int
    mean: float
    half: float | None = None  # of the interval; None of too few seeds
    p: float | None = None


def tail(t: float, freedom: int) -> float:
    """The probability that |T| is larger than t, for Student's T with whole degrees of freedom (Abramowitz and Stegun,
    26.7.3 and 26.7.4)."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    cosine2, sine = math.cos(angle) ** 2, math.sin(angle)
    if freedom % 2:
        term, total = math.cos(angle), 0.0
        for k in range(1, freedom - 1, 2):
            total += term
            term *= cosine2 * (k + 1) / (k + 2)
        inside = (angle + sine * total) * 2 / math.pi
    else:
        term, total = 1.0, 0.0
        for k in range(0, freedom - 1, 2):
            total += term
            term *= cosine2 * (k + 1) / (k + 2)
        inside = sine * total
    return max(0.0, 1.0 - inside)


def quantile(freedom: int, level: float = LEVEL) -> float:
    """The t that |T| stays below with this probability, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > 1 - level else (low, middle)
    return high


def paired(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean of differences, half of its interval and p; too few have a mean only."""
    mean = float(np.mean(values))
    if len(values) < FEWEST:
        return mean, None, None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    # Seeds that differ by exactly the same amount, such as zero, tell nothing about how it would vary.
    if error <= 1e-12 * max(1.0, abs(mean)):
        return mean, None, None
    return mean, quantile(len(values) - 1) * error, tail(mean / error, len(values) - 1)


def compare(ours: Group, other: Group) -> Difference | None:
    """In the last round in which all runs of the common seeds were evaluated; None where there is none."""
    pairs = [(a, b) for a in ours.runs for b in other.runs if a.seed == b.seed and _rounds(a) and _rounds(b)]
    common = set.intersection(*(_rounds(run) for pair in pairs for run in pair)) if pairs else set()
    if not common:
        return None
    last = max(common)
    return Difference(last, len(pairs), *paired([_at(a, last) - _at(b, last) for a, b in pairs]))


def _rounds(run: RecordedRun) -> set[int]:
    return set(run.rounds[~np.isnan(run.series[run.columns.objective.of("test")])].tolist())


def _at(run: RecordedRun, last: int) -> float:
    objective = run.columns.objective
    return objective.scale * float(run.series[objective.of("test")][np.searchsorted(run.rounds, last)])


def holm(found: Sequence[float | None]) -> list[float | None]:
    """p for so many comparisons at once, by Holm's method."""
    known = sorted((p, i) for i, p in enumerate(found) if p is not None)
    adjusted: list[float | None] = [None] * len(found)
    highest = 0.0
    for rank, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[i] = highest
    return adjusted


def tables(groups: Sequence[Group]) -> list[Table]:
    """Of each problem, every group against the one whose objective on the test data has the best mean."""
    found = []
    for problem, slug, members in problems(groups):
        objective = members[0].columns.objective
        name = objective.of("test")
        ends = {i: float(one.curve(name).mean[-1]) for i, one in enumerate(members) if one.has(name)}
        if len(ends) < 2:
            continue
        best = (max if objective.larger_is_better else min)(ends, key=ends.__getitem__)
        names = labels(members)
        others = [i for i in ends if i != best]
        differences = [compare(members[i], members[best]) for i in others]
        if any(each is not None and each.seeds >= FEWEST for each in differences):
            apart = [names[i] for i in others]
            found.append(_table(f"differences_{slug}", problem, objective, names[best], apart, differences))
    return found


def _table(
    file: str, problem: str, objective: Metric, best: str, names: Sequence[str], found: Sequence[Difference | None]
) -> Table:
    unit = "Points" if objective.percent else "Difference"
    columns = [Column("Method", numeric=False), *map(Column, ("Seeds in common", "After round", unit))]
    columns += [
        *(Column(end, "95 % interval") for end in ("from", "to")),
        Column("p"),
        Column("differs", numeric=False),
    ]
    rows = []
    for name, one, p in zip(names, found, holm([None if one is None else one.p for one in found]), strict=True):
        row = [Cell(name), *(plain(None if one is None else value) for value in (one and one.seeds, one and one.last))]
        digits = 2 if objective.percent or one is None else decimals(one.mean)
        row.append(Cell() if one is None else Cell(_signed(one.mean, digits), one.mean))
        if one is None or one.half is None or p is None:
            row += [Cell(), Cell(), Cell(), Cell("too few seeds" if one is None or one.seeds < FEWEST else SAME)]
        else:
            row += [Cell(_signed(end, digits), end) for end in (one.mean - one.half, one.mean + one.half)]
            shown = "< 0.001" if p < 0.001 else number(p, 3)
            row += [Cell(shown, p), Cell("yes" if p < 1 - LEVEL else "not shown")]
        rows.append(row)
    most = "highest" if objective.larger_is_better else "lowest"
    notes = [
        f"Test {objective.title} less that of {best}, which has the {most} mean: mean of the differences of runs with "
        f"the same seed, in the last round that all of them have, from {FEWEST} seeds on. p: paired t-test, for all "
        "comparisons of this table at once (Holm). “Not shown” does not mean equal."
    ]
    title = f"Differences from {best}: {problem}"
    return Table(file, title, columns, rows, notes=notes, section="results")


def _signed(value: float, digits: int) -> str:
    return ("+" if value > 0 else "") + number(value, digits)
