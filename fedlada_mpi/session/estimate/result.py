"""What is known of a run before it, as people and programs read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..console import amount, plural
from .extrapolation import Span


@dataclass(frozen=True)
class Estimate:
    """Of a whole run."""

    about: str
    ranks: int
    rounds: int
    start: float
    round: Span  # the mean round, without evaluation
    phases: dict[str, float]
    first: float  # by which first rounds and evaluations take longer
    evaluations: dict[str, tuple[int, float]]  # by parts of the data: how often, seconds
    checkpoints: int
    checkpoint: float
    checkpoint_bytes: int
    total: Span
    bytes_down: int  # of all rounds
    bytes_up: int
    bytes_mpi: int
    host_memory: int  # of the rank that needs most
    gpu_memory: int
    predicted_memory: int  # by shapes, as in the banner
    notes: list[str]

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("start", duration(self.start)),
            ("a round", f"{_span(self.round)}: {self._shares()}"),
            *(
                ("evaluation", f"{duration(each)}, {plural(n, 'time')}: {parts}")
                for parts, (n, each) in self._evaluated()
            ),
            (
                "checkpoint",
                f"{duration(self.checkpoint)}, {plural(self.checkpoints, 'time')}, {amount(self.checkpoint_bytes)}",
            ),
            ("the first time", f"{duration(self.first)} more, of rounds and evaluations"),
            ("whole run", _span(self.total)),
            (
                "bytes",
                f"{amount(self.bytes_down)} down, {amount(self.bytes_up)} up; MPI moves {amount(self.bytes_mpi)}",
            ),
            ("memory", self._memory()),
            *(("note", note) for note in self.notes),
        ]
        width = max(len(name) for name, _ in rows)
        lines = "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
        return f"estimate of {self.about}, {plural(self.ranks, 'rank')}\n{lines}"

    def _evaluated(self) -> list[tuple[str, tuple[int, float]]]:
        return sorted(self.evaluations.items())

    def _shares(self) -> str:
        total = self.phases["total"]
        shown = {name: value / total for name, value in self.phases.items() if name not in ("total", "eval")}
        return ", ".join(f"{name} {share:.0%}" for name, share in shown.items())

    def _memory(self) -> str:
        host = f"{amount(self.host_memory)} on the host of the largest rank"
        of_gpu = f", {amount(self.gpu_memory)} on its GPU" if self.gpu_memory else ""
        return f"{host}{of_gpu}; {amount(self.predicted_memory)} of it data, vectors and activations"


def duration(seconds: float) -> str:
    """In units that people read.

    >>> duration(0.01234), duration(12.34), duration(754), duration(9000)
    ('0.0123 s', '12.3 s', '12 min 34 s', '2 h 30 min')
    """
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _span(span: Span) -> str:
    return f"{duration(span.expected)} ({duration(span.least)} to {duration(span.most)})"
