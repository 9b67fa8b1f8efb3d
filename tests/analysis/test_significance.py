"""Paired differences over seeds; numbers from tables of Student's t, and by hand."""

import math

import pytest
from synthetic_runs import run

from fedlada_mpi.analysis import significance
from fedlada_mpi.analysis.groups import group


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_students_t(freedom, t):
    assert significance.quantile(freedom) == pytest.approx(t, abs=5e-5)
    assert significance.tail(t, freedom) == pytest.approx(0.05, abs=1e-5)
    assert significance.tail(-t, freedom) == significance.tail(t, freedom)
    assert significance.tail(0.0, freedom) == 1


def test_a_paired_difference_by_hand():
    """1, 2, 3: mean 2, standard error 1 / √3, t = 2 √3; with 2 degrees of freedom p = 1 − t / √(2 + t²)."""
    mean, half, p = significance.paired([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.30265 / math.sqrt(3), abs=1e-4)
    assert p == pytest.approx(1 - 2 * math.sqrt(3) / math.sqrt(14))
    assert significance.paired([1.0, 3.0]) == (2.0, None, None)
    assert significance.paired([2.0, 2.0, 2.0]) == (2.0, None, None)


def test_many_comparisons_at_once():
    assert significance.holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert significance.holm([0.6, 0.5]) == [1.0, 1.0]


def test_groups_are_compared_on_their_common_seeds_and_rounds():
    ours = [run([0.1, 0.50 + 0.01 * seed, 0.9], seed=seed) for seed in (0, 1, 2, 7)]
    other = [run([0.1, 0.40 + 0.02 * seed], seed=seed, algorithm="scaffold", rounds=3) for seed in (0, 1, 2)]
    found = {one.method: one for one in group([*ours, *other])}
    difference = significance.compare(found["fedavg"], found["scaffold"])
    assert (difference.last, difference.seeds) == (2, 3)
    assert difference.mean == pytest.approx(9)  # 10, 9 and 8 points
    (table,) = significance.tables(list(found.values()))
    assert [cell.text for cell in table.rows[0]] == ["SCAFFOLD", "3", "2", "−9.00", "−11.48", "−6.52", "0.004", "yes"]
    head, line = table.csv().splitlines()
    assert head.split(",")[4:6] == ["95 % interval: from", "95 % interval: to"]
    assert [float(value) for value in line.split(",")[3:6]] == pytest.approx([-9, -11.4841, -6.5159], abs=1e-4)


def test_two_seeds_are_not_compared():
    runs = [run([0.5 + 0.1 * seed], seed=seed, algorithm=m) for m in ("fedavg", "fedcm") for seed in (0, 1)]
    assert significance.tables(group(runs)) == []
