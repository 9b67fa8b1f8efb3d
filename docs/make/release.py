"""A release in one step: the version in the package, in CITATION.cff and in the changelog.

python docs/make/release.py 1.0.0            today's date
python docs/make/release.py 1.0.0 2026-12-01
"""

from __future__ import annotations

import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION, CITATION, CHANGELOG = "fedlada_mpi/support/version.py", "CITATION.cff", "docs/changelog.md"
UNRELEASED = "## Unreleased\n"


def parts(version: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"error: got {version}, expected a version such as 1.0.0")
    return tuple(map(int, version.split(".")))


def versions(root: Path) -> dict[str, str]:
    """The version that each of the files has; in the changelog, that of the newest release."""
    patterns = {
        VERSION: r'^__version__ = "(.+)"$',
        CITATION: r"^version: (.+)$",
        CHANGELOG: r"^## (\d\S*)",
    }
    return {name: re.findall(text, (root / name).read_text(), re.MULTILINE)[0] for name, text in patterns.items()}


def release(root: Path, version: str, day: str) -> None:
    """Write the version into all of them, or end with one line before anything is written."""
    before, dated = versions(root), date.fromisoformat(day)
    if len({*before.values()}) > 1:
        sys.exit(f"error: the versions differ: {before}")
    if parts(version) <= parts(before[VERSION]):
        sys.exit(f"error: got {version}, expected one after {before[VERSION]}")
    changes = (root / CHANGELOG).read_text()
    _, found, since = changes.partition(UNRELEASED)
    if not found or not since.partition("\n## ")[0].strip():
        sys.exit(f"error: {CHANGELOG} has nothing under Unreleased")
    heading = f"{UNRELEASED}\n## {version} - {dated}\n"
    citation = re.sub(r"^date-released: .*\n", "", (root / CITATION).read_text(), flags=re.MULTILINE)
    citation = re.sub(r"^version: .*$", f"version: {version}\ndate-released: '{dated}'", citation, flags=re.MULTILINE)
    text = (root / VERSION).read_text().replace(f'"{before[VERSION]}"', f'"{version}"')
    (root / VERSION).write_text(text)
    (root / CITATION).write_text(citation)
    (root / CHANGELOG).write_text(changes.replace(UNRELEASED, heading, 1))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("error: expected python docs/make/release.py VERSION [DATE]")
    release(ROOT, sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else date.today().isoformat())
    print(f"version {sys.argv[1]}: see git diff, then bash jobs/release-check.sh")
