"""What a person sees of a run, printed by the root: the banner, progress, and the summary."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from . import __version__

if TYPE_CHECKING:
    from .session import Session


def amount(count: float) -> str:
    """Bytes in a unit that people read."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def banner(session: Session, start: int, needs: np.ndarray) -> str:
    """What will run, where and how; ``needs`` holds every rank's memory estimate."""
    rows = [*_what_runs(session, start), *_where(session), *_costs(session, needs), ("files", session.config.out)]
    rows += [("note", note) for note in _notes(session, needs)]
    width = max(len(name) for name, _ in rows)
    lines = "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
    return f"fedlada_mpi {__version__}\n{lines}"


def _what_runs(session: Session, start: int) -> list[tuple[str, str]]:
    c, m = session.config, session.manifest
    path = "generic (functional torch; the stacked path is several times faster)"
    if session.network.forward is not None:
        path = "stacked" + (", compiled kernels" if session.trainer.engine.kernels is not None else "")
    return [
        ("method", f"{c.algorithm}, {c.rounds} rounds" + (f", resumed after round {start}" if start else "")),
        ("data", f"{m.dataset}: {int(m.sizes.sum())} images, {m.classes} classes, {m.clients} clients"),
        ("model", f"{c.model}, {session.network.layout.numel:,} parameters, {c.precision}, {path}"),
    ]


def _where(session: Session) -> list[tuple[str, str]]:
    from .mpi import implementation
    from .mpi.plan import cuda_aware

    world, silos, environment = session.world, _clients_per_silo(session), session.environment()
    threads = f", {environment['threads']} threads per rank" if session.device.type == "cpu" else ""
    aware = "" if cuda_aware() else "not "
    return [
        ("ranks", f"{world.size} ({world.node.size} on this node), {min(silos)} to {max(silos)} clients per silo"),
        ("device", f"{environment['device']}{threads}"),
        ("MPI", f"{implementation()}, {aware}CUDA-aware; transport: {session.transport.kind}"),
    ]


def _costs(session: Session, needs: np.ndarray) -> list[tuple[str, str]]:
    c, a, vector = session.config, session.algorithm, session.network.layout.numel * session.dtype.itemsize
    participants, at_once = c.participation * c.clients, _clients_at_once(session)
    moved = participants * (len(a.down) + len(a.up)) * vector
    per_client, shared, _ = needs.max(0)
    memory = at_once * per_client + shared + vector * (len(a.up) + len(a.down) + len(a.derived) + 1)
    what = f"{'+'.join(a.down)} down, {'+'.join(a.up)} up"
    return [
        ("a round", f"{participants:g} participants; {what}: {amount(moved)}"),
        ("memory", f"about {amount(memory)} per rank for {at_once:.1f} clients at once"),
    ]


def _notes(session: Session, needs: np.ndarray) -> list[str]:
    notes = []
    fit = min((n for n in needs[:, 2] if n), default=0)
    if 0 < fit < _clients_at_once(session):
        notes.append(f"{fit:.0f} clients fit in a GPU's memory together; more train in turns")
    idle = sum(count == 0 for count in _clients_per_silo(session))
    if idle:
        silos = session.manifest.silos
        notes.append(f"{idle} ranks have no clients: prepare shards for more than {silos} silos")
    return notes


def _clients_per_silo(session: Session) -> list[int]:
    return [int(sum(len(session.manifest.client_ids[i]) for i in silos)) for silos in session.silos_of]


def _clients_at_once(session: Session) -> float:
    """Participants that a rank with the most clients has on average."""
    return max(_clients_per_silo(session)) * session.config.participation


class Progress:
    """A progress bar on a terminal; otherwise a line per evaluation."""

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


def closing_lines(summary: dict[str, Any], records: list[dict[str, Any]], out: str) -> str:
    """The last lines that a run prints."""
    lines = [f"{summary['status']} after {summary['rounds']} rounds in {summary['seconds']:.1f} s"]
    if summary["final"]:
        best, final = summary["best"], summary["final"]
        lines.append(
            f"  test accuracy  {final['test_acc']:.2%} final, {best['test_acc']:.2%} best (round {best['round']})"
        )
        lines.append(f"  train          {final['train_acc']:.2%} accuracy, {final['train_loss']:.4f} loss")
    for target, at in summary["targets"].items():
        lines.append(f"  {float(target):.1%} test      {'not reached' if at is None else f'in round {at}'}")
    if records:
        lines += _where_time_went(records)
        down, up = (sum(r[k] for r in records) for k in ("bytes_down", "bytes_up"))
        units, moved = sum(r["paper_units"] for r in records), sum(r["bytes_mpi"] for r in records)
        lines.append(
            f"  communication  {amount(down)} down, {amount(up)} up, {units} vectors in the paper's unit; "
            f"MPI moved {amount(moved)}"
        )
    lines.append(f"  files          {out}")
    return "\n".join(lines)


def _where_time_went(records: list[dict[str, Any]]) -> list[str]:
    phases = {p: sum(r["seconds"][p] for r in records) for p in records[0]["seconds"] if p != "total"}
    total = sum(r["seconds"]["total"] for r in records) or 1.0
    shares = ", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in phases.items())
    lines = [f"  time           {shares} (slowest rank)"]
    by_rank: dict[int, float] = {}
    for record in records:
        for rank, seconds in enumerate(record["seconds_by_rank"]["train"]):
            by_rank[rank] = by_rank.get(rank, 0.0) + seconds
    busy = [(t, i) for i, t in by_rank.items() if t > 0.1 * max(by_rank.values())]
    if len(busy) > 1:
        (slow, i), (fast, j) = max(busy), min(busy)
        lines.append(f"  silos          slowest rank {i} trained {slow:.1f} s, fastest rank {j} {fast:.1f} s")
    return lines
