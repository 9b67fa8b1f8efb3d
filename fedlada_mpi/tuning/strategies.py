"""Which trials a search has, after how many rounds they are compared, and which of them go on.

All of it is a function of the plan and of the scores: a search that was killed decides again as it did before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..support.errors import UserError
from .space import Choices, Domain, drawn

STRATEGIES = ("grid", "random", "halving")
MOST_DRAWS = 10_000  # for one trial, where those before were drawn already


class Rung(NamedTuple):
    """A comparison of trials after the same number of rounds."""

    rounds: int
    trials: int  # of each method, at most


def rungs(trials: int, rounds: int, factor: int = 0, first_rounds: int = 0) -> list[Rung]:
    """Successive halving: one trial in ``factor`` goes on, to ``factor`` times as many rounds; without it one rung.

    By default the first rung is such that fewer than ``factor`` trials are left for the last one.

    >>> rungs(9, 90, 3)
    [Rung(rounds=10, trials=9), Rung(rounds=30, trials=3), Rung(rounds=90, trials=1)]
    """
    if not factor:
        return [Rung(rounds, trials)]
    at = first_rounds
    if not at:
        steps = 0
        while factor ** (steps + 1) <= trials:
            steps += 1
        at = math.ceil(rounds / factor**steps)
    found = []
    while at < rounds and trials > 1:
        found.append(Rung(at, trials))
        at, trials = at * factor, max(1, trials // factor)
    return [*found, Rung(rounds, trials)]


def points(strategy: str, space: Mapping[str, Domain], trials: int, seed: int) -> list[dict[str, Any]]:
    """The settings of all trials."""
    if strategy == "grid":
        for name, domain in space.items():
            if not isinstance(domain, Choices):
                raise UserError(f"search.{name}: got a range, expected a list of values for strategy grid")
        values = (domain.values for domain in space.values() if isinstance(domain, Choices))
        return [dict(zip(space, choice, strict=True)) for choice in itertools.product(*values)]
    known = math.prod(domain.count for domain in space.values())
    if trials > known:
        raise UserError(
            f"trials: got {trials}, but the settings to vary have {known:g} combinations: expected at most as many, or "
            "strategy grid"
        )
    found: list[dict[str, Any]] = []
    for trial in range(trials):
        draws = (drawn(space, seed, trial, again) for again in range(MOST_DRAWS))
        point = next((each for each in draws if each not in found), None)
        if point is None:
            raise UserError(f"trials: got {trials}, but no more than {len(found)} different ones were drawn")
        found.append(point)
    return found


def ranked(scores: Mapping[int, float], larger_is_better: bool) -> list[int]:
    """The trials from the best score to the worst; NaN is the worst, and of equals the first trial is better."""

    def key(trial: int) -> tuple[bool, float, int]:
        score = scores[trial]
        undefined = math.isnan(score)
        return undefined, 0.0 if undefined else -score if larger_is_better else score, trial

    return sorted(scores, key=key)


def promoted(scores: Mapping[int, float], larger_is_better: bool, most: int) -> list[int]:
    """The trials that go on, in the order of their numbers; those without a score do not."""
    best = [trial for trial in ranked(scores, larger_is_better) if not math.isnan(scores[trial])]
    return sorted(best[:most])


def total_rounds(stages: Sequence[Rung]) -> int:
    """Rounds of one method's search: a trial that goes on keeps those that it has."""
    before, total = 0, 0
    for rung in stages:
        total += rung.trials * (rung.rounds - before)
        before = rung.rounds
    return total
