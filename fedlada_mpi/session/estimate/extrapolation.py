"""From times of a few rounds to those of a whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from .forecast import Fit, Work

Due = tuple[str, ...]  # parts of the data that are evaluated together
Pick = Callable[[Sequence[float]], float]  # of repetitions


@dataclass(frozen=True)
class Span:
    """Seconds: what is expected, and with the fastest and the slowest of the repetitions."""

    expected: float
    least: float
    most: float


@dataclass
class Measured:
    """Seconds of the slowest rank."""

    rounds: list[tuple[Work, list[float]]]  # without evaluation, every repetition
    phases: dict[str, float]  # of the longest round
    first: float  # by which the first round takes longer
    capture: float  # of one further graph of a local step
    evaluations: dict[Due, list[float]]  # every repetition
    first_evaluations: float  # by which the first ones take longer
    start: float = 0.0  # from the start of the processes to the first round
    checkpoint: float = 0.0


def extrapolate(
    measured: Measured, works: Sequence[Work], rounds: int, counted: Counter[Due], captures: int, saves: int
) -> tuple[Span, Span]:
    """The mean round and the whole run, of ``rounds`` rounds of which the first have these ``works``.

    Its results are counted as one further checkpoint.
    """

    def mean(pick: Pick) -> float:
        fit = Fit.of([(work, pick(seconds)) for work, seconds in measured.rounds])
        return sum(map(fit.seconds, works)) / len(works)

    def whole(pick: Pick) -> float:
        evaluated = sum(count * pick(measured.evaluations[due]) for due, count in counted.items())
        once = measured.start + measured.first + captures * measured.capture + measured.first_evaluations
        return once + rounds * mean(pick) + evaluated + (saves + 1) * measured.checkpoint

    return _span(mean), _span(whole)


def _span(of: Callable[[Pick], float]) -> Span:
    """The ends in their order: a fit to the slowest repetitions may come out below one to the fastest."""
    expected, *ends = (of(pick) for pick in (median, min, max))
    return Span(expected, min(expected, *ends), max(expected, *ends))
