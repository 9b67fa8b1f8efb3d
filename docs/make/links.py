"""Links of Markdown pages: where they lead, and which lead nowhere. Links to other sites are not looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\(([^()\s]+)\)")
HTML = re.compile(r"""<(?:a|img)\b[^>]*?\b(?:href|src)=["']([^"']+)["']""")
CODE = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)[^\n]*$|(?<!`)(`+)(?!`)[^\n]*?(?<!`)\2(?!`)", re.DOTALL | re.MULTILINE
)
ELSEWHERE = ("http://", "https://", "mailto:")


def replaced(markdown: str, new: Callable[[re.Match[str]], str]) -> str:
    """The page with its links as ``new`` has them; its code stays as it is."""
    code: list[str] = []

    def hide(match: re.Match[str]) -> str:
        code.append(match[0])
        return f"\0{len(code) - 1}\0"

    text = LINK.sub(new, CODE.sub(hide, markdown))
    return re.sub(r"\0(\d+)\0", lambda match: code[int(match[1])], text)


def targets(markdown: str) -> Iterator[str]:
    """Where the links and pictures of a page lead."""
    text = CODE.sub(lambda match: "`code`", markdown)
    yield from (match[3] for match in LINK.finditer(text))
    yield from HTML.findall(text)


def anchors(markdown: str) -> set[str]:
    """The headings of a page, as GitHub names them."""
    found: dict[str, int] = {}
    fenced = re.sub(r"^(```+|~~~+).*?^\1", "", markdown, flags=re.DOTALL | re.MULTILINE)
    result = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", fenced, re.MULTILINE):
        text = LINK.sub(r"\2", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        result.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return result | set(re.findall(r'\bid="([^"]+)"', fenced))


def dead(root: Path, pages: Iterable[Path]) -> list[str]:
    """The links of pages that lead to no file or to no heading, each as PAGE: TARGET."""
    found = []
    for page in pages:
        for target in targets(page.read_text()):
            if target.startswith(ELSEWHERE):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page.resolve()
            known = file.exists() and file.is_relative_to(root.resolve())
            if known and anchor:
                known = file.suffix == ".md" and anchor in anchors(file.read_text())
            if not known:
                found.append(f"{page.relative_to(root)}: {target}")
    return found
