"""What a person sees of a run: the banner, progress, and the summary. Rank 0 only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm


def amount(count: float) -> str:
    """Bytes in a unit that a person reads."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def banner(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


class Show:
    """One progress bar on a terminal; otherwise one line per evaluation."""

    def __init__(self, rounds: int, start: int):
        self.rounds = rounds
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=rounds, initial=start, unit="round", dynamic_ncols=True, smoothing=0.1)

    def round(self, record: dict[str, Any], evaluated: bool) -> None:
        if self.bar is not None:
            if evaluated:
                self.bar.set_postfix_str(
                    f"test {record['test_acc']:.2%}, loss {record['train_loss']:.4f}", refresh=False
                )
            self.bar.update()
        elif evaluated:
            digits = len(str(self.rounds))
            print(
                f"round {record['round']:>{digits}}/{self.rounds}  test {record['test_acc']:6.2%}  "
                f"train {record['train_acc']:6.2%}  loss {record['train_loss']:.4f}  "
                f"{record['seconds']['total']:.3f} s",
                flush=True,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def summary(found: dict[str, Any], records: list[dict[str, Any]], out: str) -> str:
    """The last lines of a run."""
    lines = [f"{found['status']} after {found['rounds']} rounds in {found['seconds']:.1f} s"]
    if found["final"]:
        best, final = found["best"], found["final"]
        lines.append(
            f"  test accuracy  {final['test_acc']:.2%} final, {best['test_acc']:.2%} best (round {best['round']})"
        )
        lines.append(f"  train          {final['train_acc']:.2%} accuracy, {final['train_loss']:.4f} loss")
    for target, at in found["targets"].items():
        lines.append(f"  {float(target):.1%} test      {'not reached' if at is None else f'in round {at}'}")
    if records:
        phases = {p: sum(r["seconds"][p] for r in records) for p in records[0]["seconds"] if p != "total"}
        total = sum(r["seconds"]["total"] for r in records) or 1.0
        lines.append(
            "  time           " + ", ".join(f"{p} {s / total:.0%}" for p, s in phases.items()) + " (slowest rank)"
        )
        train: dict[int, float] = {}
        for record in records:
            for rank, seconds in enumerate(record["seconds_by_rank"]["train"]):
                train[rank] = train.get(rank, 0.0) + seconds
        busy = [(t, i) for i, t in train.items() if t > 0.1 * max(train.values())]
        if len(busy) > 1:
            (slow, i), (quick, j) = max(busy), min(busy)
            lines.append(f"  silos          slowest rank {i} trained {slow:.1f} s, quickest rank {j} {quick:.1f} s")
        down, up = (sum(r[k] for r in records) for k in ("bytes_down", "bytes_up"))
        units, moved = sum(r["paper_units"] for r in records), sum(r["bytes_mpi"] for r in records)
        lines.append(
            f"  communication  {amount(down)} down, {amount(up)} up, {units} vectors in the paper's unit; "
            f"MPI moved {amount(moved)}"
        )
    lines.append(f"  files          {out}")
    return "\n".join(lines)
