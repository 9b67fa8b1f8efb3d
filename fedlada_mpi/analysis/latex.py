"""Tables and figures for LaTeX: text as it is, tables with booktabs, figures with their captions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tables import Table

_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{character: "\\" + character for character in "&%$#_{}"},
    **{character: f"{{{character}}}" for character in "[]*"},  # at the start of a row, options of the row before it
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "∞": r"$\infty$",
    "≥": r"$\geq$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "‖": r"$\Vert$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "η": r"$\eta$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "∇": r"$\nabla$",
    "₁": "$_1$",
    "₂": "$_2$",
    "²": "$^2$",
    "ᵗ": "$^t$",
    "“": "``",
    "”": "''",
    "…": r"\ldots{}",
}


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is."""
    text = re.sub(r"([ηx])_([a-z])\b", lambda m: m[1] + "\0" + m[2], text)
    shown = "".join(_SPECIAL.get(character, character) for character in text)
    return re.sub("\0(.)", r"$_\1$", shown)


def table(one: Table) -> str:
    """A table to paste, or to \\input, into a paper that uses the package booktabs."""

    def line(texts: list[str]) -> str:
        return " & ".join(texts) + r" \\"

    columns = one.columns
    heads = [line([escaped(column.name) for column in columns])]
    if one.headings:
        over = [rf"\multicolumn{{{b - a + 1}}}{{c}}{{{escaped(text)}}}" if text else "" for text, a, b in one.headings]
        rules = " ".join(rf"\cmidrule(lr){{{a}-{b}}}" for text, a, b in one.headings if text)
        heads = [line(over), rules, *heads]
    body = [line([escaped(cell.text) for cell in row]) for row in one.rows]
    notes = [f"% {note}" for note in " ".join(one.notes).splitlines()]
    layout = "".join("r" if column.numeric else "l" for column in columns)
    start = [f"% {one.title}".replace("\n", " "), *notes, rf"\begin{{tabular}}{{{layout}}}", r"\toprule"]
    return "\n".join([*start, *heads, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


def figure(name: str, caption: str, wide: bool) -> str:
    """A figure with its caption; a wide one is as wide as the text, over all columns."""
    kind, width = ("figure*", r"\textwidth") if wide else ("figure", r"\columnwidth")
    picture = rf"\includegraphics[width={width}]{{{name}.pdf}}"
    return (
        "\n".join(
            [rf"\begin{{{kind}}}", r"\centering", picture, rf"\caption{{{escaped(caption)}.}}", rf"\end{{{kind}}}"]
        )
        + "\n"
    )
