"""A recorded terminal session as a picture, docs/terminal.svg. In a fresh clone:

    bash jobs/quickstart.sh --help        # installs
    .venv/bin/pip install pyte
    .venv/bin/python docs/make/terminal.py > docs/terminal.svg

The commands run for real; every line is what they print. The clone is made for the picture, and the session goes on in
this one, which has been installed. The images of "own data" are the embedded digits, written as files into a folder per
class.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from html import escape
from pathlib import Path

import numpy as np
import pyte
from PIL import Image

CLONE = "git clone REPOSITORY fedlada_mpi && cd fedlada_mpi"
COMMANDS = (
    "bash jobs/quickstart.sh",
    ". .venv/bin/activate",
    "ls pictures/train pictures/test",
    "python -m data_prep --dataset imagefolder --raw pictures --clients 20 --silos 3",
    "python -m fedlada_mpi.run -n 4 --dataset pictures --algorithm scaffold --lr 0.05 --rounds 20 --eval-every 5",
    "python -m fedlada_mpi.report runs --out report",
)
COLUMNS, ROWS = 112, 5000
PROMPT = "$ "
WIDTH, HEIGHT, MARGIN = 8.0, 18, 16  # of a character, of a line, around all, in pixels
DIGITS = Path(__file__).parents[2] / "fedlada_mpi/data/sources/digits.npz"


def write_pictures(folder: Path) -> None:
    """The digits as files, in a folder per class."""
    with np.load(DIGITS) as digits:
        for part in ("train", "test"):
            for index, (image, label) in enumerate(
                zip(digits[f"{part}_images"], digits[f"{part}_labels"], strict=True)
            ):
                path = folder / part / str(label) / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.squeeze(image)).save(path)


def record(folder: Path) -> list[str]:
    """What a terminal shows at the end of the session."""
    # A shell in place of a person: the prompt and the command, then its output.
    other = '(cd "$(mktemp -d)" && git clone "$OLDPWD" fedlada_mpi && rm -rf "$PWD")'
    typed = {CLONE: other, **{command: command for command in COMMANDS}}
    script = "\n".join(f"printf '%s\\n' {PROMPT!r}{_quoted(shown)}\n{run}" for shown, run in typed.items())
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "PYTHONPATH")}
    process = subprocess.Popen(
        ["bash", "-euc", script],
        cwd=folder,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    screen = pyte.Screen(4 * COLUMNS, ROWS)  # lines are broken below, without the folder's name
    stream = pyte.ByteStream(screen)
    while chunk := _read(ours):
        stream.feed(chunk)
    if process.wait():
        sys.exit("\n".join([*map(str.rstrip, screen.display)]).rstrip())
    text = "\n".join(map(str.rstrip, screen.display)).replace(f"{folder}/", "").rstrip()
    return [line[i : i + COLUMNS] for line in text.split("\n") for i in range(0, max(1, len(line)), COLUMNS)]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # as Linux has it where all writers are gone
        return b""


def svg(lines: list[str]) -> str:
    width, height = round(COLUMNS * WIDTH + 2 * MARGIN), len(lines) * HEIGHT + 2 * MARGIN
    rows = []
    for number, line in enumerate(lines):
        if line:
            kind = ' class="typed"' if line.startswith(PROMPT) else ""
            # With its length stated, a line is as wide in every font.
            place = f'x="{MARGIN}" y="{MARGIN + HEIGHT * number + 13}" textLength="{len(line) * WIDTH:g}"'
            rows.append(f"<text {place}{kind}>{escape(line)}</text>")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            "<title>A terminal session: clone, quickstart, own data, own settings, report</title>",
            "<style>text { font: 13px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #d5dbe3;"
            " white-space: pre } .typed { fill: #8fd6a8; font-weight: bold }</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1b2129"/>',
            *rows,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    here = Path.cwd()
    for name in ("pictures", "runs", "report"):
        if (here / name).exists():
            sys.exit(f"error: {name} is there already: make the recording in a fresh clone")
    write_pictures(here / "pictures")
    print(svg(record(here)))
