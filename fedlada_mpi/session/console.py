"""What a person sees of a run, printed by the root: progress, and the summary."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from ..rounds.watcher import Watcher
from ..rundir.columns import CLASSIFICATION, LOSS, TOTALS, Columns
from ..support.launcher import TERMINAL


def amount(count: float) -> str:
    """Bytes in a unit that people read."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def plural(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def terminal() -> int:
    """The width of the terminal on which this process's messages are shown; 0 if they go elsewhere.

    A rank writes to a pipe, and mpirun to the terminal.
    """
    if sys.stderr.isatty():
        return shutil.get_terminal_size().columns
    width = os.environ.get(TERMINAL, "")
    if width.isdecimal():
        return int(width)
    with suppress(OSError), open(f"/proc/{os.getppid()}/fd/2", "wb", opener=_without_taking) as stream:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    return 0


def _without_taking(path: str, flags: int) -> int:
    """Open a terminal for writing, without making it this process's own, or emptying what is no terminal."""
    return os.open(path, os.O_WRONLY | os.O_NOCTTY)


class Progress(Watcher):
    """A line per evaluation, and on a terminal a bar below them with the time at which the run will end."""

    def __init__(self, rounds: int, start: int, quiet: bool = False, columns: Columns = CLASSIFICATION):
        self.rounds, self.quiet, self.objective = rounds, quiet, columns.objective
        self.bar = None
        if not quiet and (width := terminal()):
            text = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rounds [{elapsed}, {remaining} left, end {eta:%H:%M}]"
            # A bar that fills the last column makes some terminals begin a new line.
            self.bar = tqdm(total=rounds, initial=start, ncols=width - 1, smoothing=0.1, bar_format=text)

    def recorded(self, record: dict[str, Any]) -> None:
        if left_out := record.get("nonfinite"):
            numbers = [left_out] if isinstance(left_out, int) else left_out
            names = f"client{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            if isinstance(left_out, int):  # of --secure, whose silos name them in their logs
                names = plural(left_out, "client")
            self.say(f"note: round {record['round']}: left out {names}, whose result is not finite")
        if beyond := record.get("out_of_range"):
            values = plural(beyond, "value")
            self.say(f"note: round {record['round']}: {values} beyond --secure-range, which count as its end: raise it")
        objective = self.objective
        parts = (part for part in ("test", "val", "train") if record.get(objective.of(part)) is not None)
        results = {part: f"{part} {objective.shown(record[objective.of(part)]):>6}" for part in parts}
        if "train" in results and objective != LOSS:
            results["train"] += f"  loss {LOSS.shown(record[LOSS.of('train')])}"
        if results and not self.quiet:
            words = [f"round {record['round']:>{len(str(self.rounds))}}/{self.rounds}", *results.values()]
            if (epsilon := record.get("epsilon")) is not None:
                words.append(f"epsilon {epsilon:.3f}")
            line = "  ".join([*words, f"{record['seconds']['total']:.3f} s"])
            if self.bar is None:
                print(line, flush=True)
            else:
                self.bar.write(line, file=sys.stderr)
        if self.bar is not None:
            self.bar.update()

    def say(self, text: str) -> None:
        """Print text, above the bar where there is one."""
        if self.bar is not None:
            self.bar.write(text)
        elif not self.quiet:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def closing_lines(
    summary: dict[str, Any], records: list[dict[str, Any]], out: str, columns: Columns = CLASSIFICATION
) -> str:
    """The last lines that a run prints."""
    objective = columns.objective
    lines = [f"{summary['status']} after {plural(summary['rounds'], 'round')} in {summary['seconds']:.1f} s"]
    by_validation, final = summary.get("best_validation"), summary["final"]
    if final:
        best = by_validation or summary["best"]
        test, train = objective.of("test"), objective.of("train")
        reached = f"{objective.shown(final[test])} final"
        if best and best[test] is not None:  # an objective may be undefined in all rounds, or not asked for
            there = f"by validation, round {best['round']}" if by_validation else f"round {best['round']}"
            reached += f", {objective.shown(best[test])} best ({there})"
        lines.append(f"  test {objective.title:<9} {reached}")
        others = [metric for metric in columns.metrics if metric not in (LOSS, objective)]
        if known := [f"{m.title} {m.shown(v)}" for m in others if (v := final[m.of("test")]) is not None]:
            lines.append(f"  test, too      {', '.join(known)}")
        if final[train] is not None:
            loss = final[LOSS.of("train")]
            shown = "not finite" if loss is None else LOSS.shown(loss)
            also = f", {shown} loss" if objective != LOSS else ""
            lines.append(f"  train          {objective.shown(final[train])} {objective.title}{also}")
    if by_validation:
        chosen = objective.shown(by_validation[objective.of("val")])
        lines.append(f"  validation     {chosen} best (round {by_validation['round']})")
    if spent := summary.get("privacy"):
        lines.append(f"  privacy        epsilon {spent['epsilon']:.4g} at delta {spent['delta']:g}, of clients")
    for target, at in summary["targets"].items():
        level = f"{float(target):.1%}" if objective.percent else f"{objective.name} {float(target):g}"
        lines.append(f"  {level} test      {'not reached' if at is None else f'in round {at}'}")
    if records:
        lines += _where_time_went(records)
        down, up, moved, units = (summary[name] for name in TOTALS)
        lines.append(
            f"  communication  {amount(down)} down, {amount(up)} up, {units} vectors in the paper's unit; "
            f"MPI moved {amount(moved)}"
        )
    lines.append(f"  files          {out}")
    if summary["status"] == "stopped":
        lines.append(f"  go on with     python -m fedlada_mpi.run --resume {shlex.quote(out)}")
    return "\n".join(lines)


def _where_time_went(records: list[dict[str, Any]]) -> list[str]:
    phases = {p: sum(r["seconds"][p] for r in records) for p in records[0]["seconds"] if p != "total"}
    total = sum(r["seconds"]["total"] for r in records) or 1.0
    shares = ", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in phases.items())
    lines = [f"  time           {shares} (slowest rank)"]
    rows = [record["seconds_by_rank"]["train"] for record in records]
    # Of the ranks that there are now: the run may have had others before.
    by_rank = [sum(column) for column in zip(*(row for row in rows if len(row) == len(rows[-1])), strict=True)]
    busy = [(t, i) for i, t in enumerate(by_rank) if t > 0.1 * max(by_rank)]
    if len(busy) > 1:
        (slow, i), (fast, j) = max(busy), min(busy)
        lines.append(f"  silos          slowest rank {i} trained {slow:.1f} s, fastest rank {j} {fast:.1f} s")
    return lines
