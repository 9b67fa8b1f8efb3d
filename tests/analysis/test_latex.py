"""Text, tables and figures for LaTeX."""

import pytest

from fedlada_mpi.analysis import latex
from fedlada_mpi.analysis.tables import Cell, Column, Table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50 % & a_b #1 $5 {x}", r"50 \% \& a\_b \#1 \$5 \{x\}"),
        ("a\\b^c~", r"a\textbackslash{}b\textasciicircum{}c\textasciitilde{}"),
        ("49.0 ± 3.9", r"49.0 $\pm$ 3.9"),
        ("> 1,500", r"$>$ 1,500"),
        ("−4", "$-$4"),
        ("η_l=0.1, β₁", r"$\eta$$_l$=0.1, $\beta$$_1$"),
    ],
)
def test_text_is_printed_as_it_is(text, expected):
    assert latex.escaped(text) == expected


def test_a_table_to_paste():
    columns = [Column("Method", numeric=False), Column("ours", "70 %"), Column("paper", "70 %"), Column("n")]
    table = Table("a", "A title", columns, [[Cell("A_1"), Cell("5 ± 1"), Cell("4"), Cell()]], notes=["A note."])
    assert latex.table(table).splitlines() == [
        "% A title",
        "% A note.",
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r" & \multicolumn{2}{c}{70 \%} &  \\",
        r"\cmidrule(lr){2-3}",
        r"Method & ours & paper & n \\",
        r"\midrule",
        r"A\_1 & 5 $\pm$ 1 & 4 & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
