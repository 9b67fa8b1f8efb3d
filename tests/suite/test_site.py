"""The pages of docs/: their links, the command reference, and the site that mkdocs builds from them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from command_reference import page
from limits import LIMIT
from links import anchors, dead, replaced, targets
from repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*/*.md"))]


def test_no_link_is_dead():
    assert dead(ROOT, PAGES) == []


def test_pictures_have_a_text():
    for path in PAGES:
        assert not re.findall(r"!\[\s*\]\(", path.read_text()), path


def test_dead_links_are_found(tmp_path):
    """Of the eleven links, six lead nowhere."""
    (tmp_path / "other.md").write_text("# Best: `best.pt`, and more\n## Twice\n## Twice\n```\n# no heading\n```\n")
    (tmp_path / "page.md").write_text(
        "# Own\n[a](other.md) [b](other.md#best-bestpt-and-more) [c](#own) [`d`](other.md#twice-1) [e](https://x.org/none)\n"
        "[f](none.md) [g](other.md#twice-2) [h](#none) ![i](none.png) [j](../outside.md)\n"
        "`[code](none1.md)`\n```\n[code](none2.md)\n```\n<img src='none.svg'>\n"
    )
    (tmp_path.parent / "outside.md").touch()
    assert len([*targets((tmp_path / "page.md").read_text())]) == 11
    names = ["none.md", "other.md#twice-2", "#none", "none.png", "../outside.md", "none.svg"]
    assert dead(tmp_path, [tmp_path / "page.md"]) == [f"page.md: {name}" for name in names]
    assert anchors((tmp_path / "other.md").read_text()) == {"best-bestpt-and-more", "twice", "twice-1"}


def test_links_in_code_are_left_alone():
    text = "[a](b) `[a](b)`\n```\n[a](b)\n```\n"
    assert replaced(text, lambda match: match[2].upper()) == "A `[a](b)`\n```\n[a](b)\n```\n"


def test_the_reference_is_that_of_the_code():
    shown = (ROOT / "docs/reference.md").read_text()
    assert shown == page(), "make it again: python docs/make/command_reference.py > docs/reference.md"


def test_every_page_is_in_the_navigation():
    known = [str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]]
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == sorted([*known, "index.md"])


class References(HTMLParser):
    """The names that a built page has, and where its links and pictures lead."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.leads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids.add(values.get("id"))
        self.leads |= {values[name] for name in ("href", "src") if values.get(name)}


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs the extra docs")
def test_the_site(tmp_path):
    """Builds without a warning; no page links to what is not there, or loads anything from elsewhere."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    pages = {path: References(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert {"index.html", "reference.html", "fedlada.py.html"} <= {path.name for path in pages}
    for path, references in pages.items():
        for lead in references.leads:
            if lead.startswith(("https://", "data:")):
                continue
            name, _, anchor = lead.partition("#")
            target = (path.parent / unquote(name)).resolve() if name else path
            assert target.exists(), (path, lead)
            assert not anchor or target.suffix != ".html" or unquote(anchor) in pages[target].ids, (path, lead)
        assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?:', path.read_text()), path
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    assert any("--max-clients-at-once" in entry["text"] for entry in found)
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 20e6
