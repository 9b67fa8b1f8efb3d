"""The budget of a run on the root: its ledger, what is spent, and whether another round may begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..settings import Config
from ..support.errors import UserError
from .accounting import Accountant, calibrated
from .ledger import CALIBRATION, LEDGER, Ledger
from .mechanism import Mechanism


class Budget:
    """
    >>> budget = Budget(config, start=0)
    >>> while budget.permits():
    ...     budget.spend(number=1, clip=1.0, ranks=4)
    """

    def __init__(self, config: Config, start: int):
        """For a run that goes on after round ``start``."""
        self.limit, self.delta, self.out = config.epsilon, config.delta, Path(config.out)
        self.ledger = Ledger(self.out)
        self._refuse_lost_entries(start)
        self.pending: dict[str, Any] | None = None  # a calibration that is not in the ledger yet
        calibration = self._calibration(config, start) if config.epsilon else {"z": config.noise_multiplier}
        self.mechanism = Mechanism.of(config, calibration["z"])
        self.release, earlier = self.mechanism.release, self.ledger.releases
        self.accountant = Accountant(config.delta, earlier, [self.release])
        self.earlier = self.released = len(earlier)
        # Releases that are known to be within the budget, which need not be computed again.
        self.allowed = calibration.get("rounds", 0) if {*earlier} <= {self.release} else 0
        if not start and not self.permits():
            raise UserError(
                f"{self.ledger.path} has {self.earlier} releases, which cost epsilon {self.epsilon:.3g} of --epsilon "
                f"{self.limit:g}, and they count, also if the run is started again: choose another --out"
            )

    def _calibration(self, config: Config, start: int) -> dict[str, Any]:
        asked = dict(epsilon=config.epsilon, delta=config.delta, q=config.participation)
        # A run that goes on keeps its noise, also when it is asked for more rounds.
        if found := self.ledger.calibration(asked if start else {**asked, "rounds": config.rounds}):
            return found
        noise = calibrated(config.participation, config.rounds, config.epsilon, config.delta)
        found = {**asked, "rounds": config.rounds, "z": noise}
        self.pending = {CALIBRATION: found}
        return found

    def _refuse_lost_entries(self, start: int) -> None:
        missing = set(range(1, start + 1)) - self.ledger.rounds
        if missing:
            raise UserError(
                f"{self.ledger.path} lacks {len(missing)} of the {start} rounds of this run, whose epsilon is then not "
                f"known: put {LEDGER} back as it was, or start another run with another --out"
            )

    @property
    def epsilon(self) -> float:
        """That is spent."""
        return self.accountant.epsilon

    @property
    def after_next(self) -> float:
        """The epsilon after one more release."""
        return self.accountant.epsilon_after(self.release)

    def permits(self) -> bool:
        """Whether one more release stays within the budget; always, where only the noise is given."""
        return not self.limit or self.released < self.allowed or self.after_next <= self.limit

    def spend(self, number: int, clip: float, ranks: int) -> None:
        """Write down the release of round ``number``, which may begin when this returns."""
        if self.pending is not None:
            self.ledger.add(self.pending)
            self.pending = None
        share, noise = self.release
        self.ledger.add({"round": number, "q": share, "z": noise, "clip": clip, "ranks": ranks})
        self.accountant.add(self.release)
        self.released += 1

    @property
    def refusal(self) -> str:
        """Why no other round begins."""
        return (
            f"epsilon {self.epsilon:.4g} is spent, and one more round would make it {self.after_next:.4g}, more than "
            f"--epsilon {self.limit:g} at delta {self.delta:g}: the run stops here"
        )

    def summary(self) -> dict[str, float]:
        return {"epsilon": self.epsilon, "delta": self.delta, "releases": self.released}
