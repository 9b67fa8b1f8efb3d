"""What the site has beyond docs/: README.md as its first page, and the source files that pages link to.

mkdocs calls these functions; see mkdocs.yml.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from links import ELSEWHERE, replaced, targets

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> None:
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=readme))
    pages = {
        DOCS / file.src_uri: file.content_string for file in files.documentation_pages() if file.src_uri != "index.md"
    }
    sources = {
        path
        for page, text in {**pages, ROOT / "README.md": readme}.items()
        for target in targets(text)
        if (path := _outside(page, target)) is not None and path.is_file()
    }
    for path in sorted(sources):
        name = path.relative_to(ROOT)
        code = f"# {name}\n\n````{LANGUAGES.get(path.suffix, '')}\n{path.read_text()}````\n"
        files.append(File.generated(config, f"source/{name}.md", content=code))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site needs them: to pages of source, and none to folders."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    where = ROOT / "README.md" if uri == "index.md" else DOCS / uri

    def new(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if target.startswith((*ELSEWHERE, "#")):
            return match[0]
        path, hash_, anchor = target.partition("#")
        file = (where.parent / path).resolve()
        if file.is_dir():
            return text
        if (source := _outside(where, target)) is not None:
            return f"[{text}]({_from(uri, f'source/{source.relative_to(ROOT)}.md')})"
        return f"{picture}[{text}]({_from(uri, str(file.relative_to(DOCS)))}{hash_}{anchor})"

    return replaced(markdown, new)


def _from(uri: str, target: str) -> str:
    """A path in docs/ as a page there links to it."""
    return os.path.relpath(target, Path(uri).parent)


def _outside(page: Path, target: str) -> Path | None:
    """The file that a link leads to, if that is not in docs/."""
    if target.startswith((*ELSEWHERE, "#")):
        return None
    path = (page.parent / target.partition("#")[0]).resolve()
    return None if path.is_relative_to(DOCS) else path
