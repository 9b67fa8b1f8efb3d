"""Names of users' methods and data sets in tables: they are texts, never formulas, tags, links or row breaks."""

import csv
import io

import pytest

from fedlada_mpi.analysis import latex, load
from fedlada_mpi.analysis.tables import Cell, Column, Table


def table(text: str) -> Table:
    columns = [Column(text, numeric=False), Column("value")]
    return Table("a", text, columns, [[Cell(text), Cell("−1.5", -1.5)], [Cell("fedavg"), Cell("-2", None)]])


@pytest.mark.parametrize("name", ["=1+1", "@SUM(A1)", "+cmd|' /C calc'!A0", "-2+3", '=HYPERLINK("http://x")'])
def test_a_spreadsheet_computes_no_name(name):
    head, first, second = csv.reader(io.StringIO(table(name).csv()))
    assert head == [f"'{name}", "value"]
    assert first == [f"'{name}", "-1.5"]
    assert second == ["fedavg", "-2"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", r"a\|b"),
        (r"a\|b", r"a\\\|b"),
        ("<script>alert(1)</script>", r"\<script>alert(1)\</script>"),
        ("<!-- -->", r"\<!-- -->"),
        ("[x](javascript:y)", r"[x]\(javascript:y)"),
        ("p < 0.05, local_adam [s]", "p < 0.05, local_adam [s]"),
    ],
)
def test_markdown_shows_a_name_as_it_is(name, shown):
    lines = table(name).markdown().splitlines()
    assert lines[0] == f"### {shown}"
    assert lines[2] == f"| {shown} | value |"
    assert lines[4] == f"| {shown} | −1.5 |"


def test_latex_takes_no_options_from_a_name():
    """Behind the end of a row, brackets and stars would be options of it."""
    assert r"{[}3cm{]} & $-$1.5 \\" in latex.table(table("[3cm]"))
    assert r"{*}a & $-$1.5 \\" in latex.table(table("*a"))


def test_a_long_name_is_cut_once_and_told_apart_from_others():
    one, other = ("x" * 10_000_000 + end for end in "ab")
    assert len(load.label(one)) == load.LONGEST
    assert load.label(one) != load.label(other)
    assert load.label("x" * 200) == "x" * 200
    assert load.label("\ud800\n" * 500).isprintable()
