"""A table of a grid's runs on the terminal, drawn again in place while they are at work."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

from . import PlannedRun
from .progress import FAILED, RUNNING, RunProgress, closing_line, measure, rows

SECONDS = 1.0  # between two drawings, at least
SHARE = 0.05  # of the time, at most, to read what the runs have written
UP, CLEAR = "\x1b[{}F", "\x1b[J"


def possible() -> bool:
    """Whether there is a terminal on which a table can be drawn in place."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class LiveTable:
    """The runs that ``at_once`` at a time are at work here; the others are looked at in turns, for other processes."""

    def __init__(self, runs: Sequence[PlannedRun], at_once: int):
        self.runs, self.at_once = runs, at_once
        self.known: list[RunProgress] = [measure(run) for run in runs]
        self.others = cycle(range(len(runs)))
        self.drawn = 0  # lines, above the cursor
        self.due = 0.0

    def show(self, running: Iterable[int], failed: Iterable[int], note: str = "", now: bool = False) -> None:
        """Draw the table if it is time to, or ``now``; ``running`` and ``failed`` are those of this process."""
        start = time.monotonic()
        if not now and start < self.due:
            return
        here = dict.fromkeys(running, RUNNING)
        states = {**dict.fromkeys(failed, FAILED), **here}
        at_work = {*here, *(index for index, run in enumerate(self.known) if run.state == RUNNING)}
        for index in range(len(self.runs)) if now else {*at_work, next(self.others)}:
            self.known[index] = measure(self.runs[index])
        self._draw([*self._lines(states), *([note] if note else [])])
        end = time.monotonic()
        self.due = end + max(SECONDS, (end - start) / SHARE)

    def above(self, line: str) -> None:
        """A line that stays; the table goes on below it."""
        self._draw([])
        print(line, flush=True)

    def _lines(self, states: Mapping[int, str]) -> list[str]:
        runs = [replace(run, state=states.get(index, run.state)) for index, run in enumerate(self.known)]
        width, height = shutil.get_terminal_size()
        head, *body = rows(runs, time.time(), holders=False)
        shown = selected(runs, max(1, height - 5))
        lines = [head, *(body[index] for index in shown)]
        if len(shown) < len(runs):
            lines.append(f"and {len(runs) - len(shown)} more: --status lists all")
        lines.append(closing_line(runs, time.time(), self.at_once))
        return [line[: width - 1] for line in lines]

    def _draw(self, lines: Sequence[str]) -> None:
        back = UP.format(self.drawn) if self.drawn else ""
        sys.stdout.write(back + CLEAR + "".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        self.drawn = len(lines)


def selected(runs: Sequence[RunProgress], most: int) -> list[int]:
    """The indices of the runs to show where not all fit: the running and failed ones, then their neighbours."""
    at_work = [index for index, run in enumerate(runs) if run.state == RUNNING]
    here = at_work[-1] if at_work else 0
    first = {RUNNING: 0, FAILED: 1}
    order = sorted(range(len(runs)), key=lambda index: (first.get(runs[index].state, 2), abs(index - here)))
    return sorted(order[:most])
