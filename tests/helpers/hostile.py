"""Inputs that people, crashes and broken disks produce, for the tests and for ``tests/campaigns/inputs.py``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

DEEP = "[" * 100_000
LONG = "x" * 5000
# Texts where a number, a name or a path is expected.
TEXTS = [
    "", " ", "-", "--", "nan", "inf", "-inf", "1e300", "-1e300", "1e-300", "1e400", "0", "-1", "0.5", "1e9",
    "2147483648", "9223372036854775808", "9" * 400, "9" * 5000, "²", "٣", "1_000", "0x10", "true", "None", "[1]", "{}",
    ":", ":x", "x:", "a:b:c", "../..", "/", ".", "~", "/dev/null", "/dev/zero", "$x_{", "<script>", "%s", "\n",
    "a\nb", "\x00", "\udcff", "\x1b[31m", LONG, "a/" * 3000, "🦆",
]  # fmt: skip
# Values of JSON and TOML where a number is expected.
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 0.5, 2**31, 2**63, 10**400, 1e300, -1e300, float("nan"), float("inf"), "", "x", "0.5",
    "$x_{", "<script>alert(1)</script>", LONG, "\udcff", "a\nb", [], [1], [[1]], ["x"], [None], {}, {"a": 1},
    {"train": "x"}, {"train": [1, None]}, {"total": 1e300}, {"wait": [1, 2]},
]  # fmt: skip

texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20), st.floats().map(str), st.integers().map(str))
values = st.recursive(
    st.one_of(st.sampled_from(VALUES), st.floats(), st.integers(), st.text(max_size=10)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["train", "total", "wait", "x"]), inner, max_size=3),
    ),
    max_leaves=5,
)

Damage = Callable[[bytes], bytes]
# What happens to the bytes of a file.
DAMAGES: dict[str, Damage] = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "cut in half": lambda content: content[: len(content) // 2],
    "last byte lost": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
    "garbage": lambda content: os.urandom(max(64, len(content))),
    "not UTF-8": lambda content: b"\xff\xfe\x80" + content,
    "UTF-16": lambda content: content.decode("latin-1").encode("utf-16"),
    "twice": lambda content: content + content,
    "a pickle": lambda content: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94(K\x01K\x02e.",
    "nested": lambda content: DEEP.encode(),
    "a list": lambda content: b"[1, 2]\n",
    "a number": lambda content: b"1\n",
    "null": lambda content: b"null\n",
    "text": lambda content: b"hello\n",
}


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """A named damage, or a few bits flipped, bytes cut out or put in."""
    if draw(st.booleans()):
        return DAMAGES[draw(st.sampled_from(sorted(DAMAGES)))]
    place, flips, bit = draw(st.floats(0, 1, exclude_max=True)), draw(st.booleans()), draw(st.integers(0, 7))
    cut, extra = draw(st.integers(0, 40)), draw(st.binary(max_size=8))

    def damage(content: bytes) -> bytes:
        at = int(place * len(content))
        if flips and content:
            return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]
        return content[:at] + extra + content[at + cut :]

    return damage


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


# What may be there instead of a file.
OBSTACLES: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: path.unlink(missing_ok=True),
    "a directory": lambda path: _replace(path, Path.mkdir),
    "a FIFO": lambda path: _replace(path, os.mkfifo),
    "a broken link": lambda path: _replace(path, lambda p: p.symlink_to("nowhere")),
    "a link to itself": lambda path: _replace(path, lambda p: p.symlink_to(p.name)),
    "a device": lambda path: _replace(path, lambda p: p.symlink_to("/dev/zero")),
}


def damage_file(path: Path, kind: str) -> None:
    """Damage a file by one of DAMAGES, or put one of OBSTACLES in its place."""
    if kind in OBSTACLES:
        OBSTACLES[kind](path)
    else:
        path.write_bytes(DAMAGES[kind](path.read_bytes()))


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; ``...`` removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


def change_lines(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in change(path.read_bytes().split(b"\n")[:-1])))


def one_line(text: str) -> bool:
    """Whether an error is one printable line, of a length that fits on a screen or two."""
    return text.isprintable() and 0 < len(text) < 2000
