"""What the banner says of a private run."""

from __future__ import annotations

from ..privacy.budget import Budget
from ..rounds.aggregate import PrivateSums
from .assemble import Session

TOO_LOUD = 5  # times the clip: noise of a mean, above which what is learned may drown


def _loudness(session: Session, budget: Budget) -> float:
    numbers = len(session.algorithm.up) * session.network.layout.numel
    aggregation = session.silo.aggregation
    excess = aggregation.excess if isinstance(aggregation, PrivateSums) else 1.0
    return budget.mechanism.noise_over_clip(numbers) * excess


def row(session: Session, budget: Budget) -> str:
    c, mechanism = session.config, budget.mechanism
    asked = f"epsilon {c.epsilon:g}" if c.epsilon else f"noise multiplier {c.noise_multiplier:g}"
    follows = ", adaptive" if c.adaptive_clip else ""
    return (
        f"of clients, {asked} at delta {c.delta:g}; clip {c.clip_norm:g}{follows}; noise of a sum "
        f"{mechanism.vector_noise:.3g} x the clip in every coordinate, of a mean {_loudness(session, budget):.2g} x "
        "the clip in all"
    )


def notes(session: Session, budget: Budget) -> list[str]:
    found, loudness = [], _loudness(session, budget)
    if loudness > TOO_LOUD:
        found.append(
            f"the noise of a mean is {loudness:.2g} times the clip, and may drown what is learned: more clients, a "
            "smaller model or a larger --epsilon make it less"
        )
    if session.algorithm.dp.warning:
        found.append(f"--dp with {session.config.algorithm}: {session.algorithm.dp.warning}")
    if budget.earlier and not session.start:
        found.append(f"{budget.ledger.path} has {budget.earlier} releases of earlier starts, which count")
    return found
